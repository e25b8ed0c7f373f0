"""Conversations that the server remembers for clients that ask it to: they send new messages only.

candle-vLLM's `record_conversation`. Nothing is kept unless a request or the server's option asks, nothing reaches a
disk, and what is kept is bounded by number, bytes and age.
"""

from __future__ import annotations

import time
import uuid

import msgspec

from .api_error import ApiError
from .conversation import Message

MAX_BYTES = 64 << 20  # of all that is kept, as JSON
MAX_AGE = 24 * 3600.0  # seconds since the last answer
PREFIX = "conv_"  # of the ids that the server makes
INSTRUCTIONS = ("system", "developer")


class Conversation:
    """What was said under one id, by the requests of one API key."""

    def __init__(self, key: int, id: str):
        self.key = key
        self.id = id
        self.created = int(time.time())
        self.messages: list[Message] = []
        self.size = 0  # bytes
        self.used = time.monotonic()
        self.removed = False  # by the client, perhaps while an answer is made

    def with_new(self, messages: list[Message]) -> list[Message]:
        """Everything up to these. New instructions at the beginning take the place of the earlier ones."""
        earlier = self.messages
        if messages[0].role in INSTRUCTIONS:
            earlier = [one for one in earlier if one.role not in INSTRUCTIONS]
            count = next((i for i, one in enumerate(messages) if one.role not in INSTRUCTIONS), len(messages))
            return [*messages[:count], *earlier, *messages[count:]]
        return [*earlier, *messages]


class ConversationStore:
    """At most `most` conversations, of which the ones that were longest not used go first."""

    def __init__(self, most: int):
        self.most = most
        self._kept: dict[tuple[int, str], Conversation] = {}
        self._answered: set[tuple[int, str]] = set()  # in which an answer is being made

    def get(self, id: str, key: int) -> Conversation:
        """Raises ApiError 404, also for what came with another API key."""
        self._trim()
        kept = self._kept.get((key, id))
        if kept is None:
            why = f"the last {self.most} are kept, for {MAX_AGE / 3600:.0f} hours"
            if not self.most:
                why = "none is kept (--conversation-store 0)"
            raise ApiError(
                404, f"there is no conversation {id[:100]!r} here: {why}", "conversation_id", "conversation_not_found"
            )
        return kept

    def begin(self, id: str | None, key: int) -> Conversation:
        """The conversation that an answer is made in, until `release`; a new one where a client's own id is not known.

        Raises ApiError 404 for an id of the server's that is not kept, and 409 where another answer is being made.
        """
        self._trim()
        if id is None or (not id.startswith(PREFIX) and (key, id) not in self._kept):
            found = Conversation(key, id or PREFIX + uuid.uuid4().hex[:24])
        else:
            found = self.get(id, key)
        if (key, found.id) in self._answered:
            raise ApiError(
                409,
                f"the conversation {found.id[:100]!r} is being answered: send one request after the other",
                "conversation_id",
                "conversation_busy",
            )
        self._answered.add((key, found.id))
        return found

    def release(self, conversation: Conversation) -> None:
        """No answer is made in it any more, whether there is one or not."""
        self._answered.discard((conversation.key, conversation.id))

    def end(self, conversation: Conversation, messages: list[Message]) -> None:
        """An answer is whole: `messages` are all of the conversation with it."""
        if conversation.removed:
            return
        conversation.messages = messages
        conversation.size = len(msgspec.json.encode(messages))
        conversation.used = time.monotonic()
        self._kept.pop((conversation.key, conversation.id), None)  # the last one used is the last
        self._kept[conversation.key, conversation.id] = conversation
        self._trim()

    def remove(self, id: str, key: int) -> None:
        """Forget it. Raises ApiError 404."""
        self.get(id, key).removed = True
        del self._kept[key, id]

    def _trim(self) -> None:
        """Forget what is too much or too old."""
        size = sum(one.size for one in self._kept.values())
        oldest = time.monotonic() - MAX_AGE
        for at, one in list(self._kept.items()):
            if len(self._kept) <= self.most and size <= MAX_BYTES and one.used >= oldest:
                return
            size -= one.size
            del self._kept[at]
