"""Conversations that the server remembers for clients that ask it to: they send new messages only.

candle-vLLM's `record_conversation`. Nothing is kept unless a request or the server's option asks, nothing reaches a
disk, and what is kept is bounded by number, bytes and age.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from .api_error import ApiError
from .conversation import Message
from .kept_files import KeptFiles
from .responses_request import items_of, messages_of
from .shares import SharedStore

log = logging.getLogger(__name__)
MAX_BYTES = 64 << 20  # of all that is kept, as JSON
MAX_AGE = 24 * 3600.0  # seconds since the last answer
MAX_ADDED = 8 << 20  # bytes of items, as JSON, that clients make a conversation of: more fits into no prompt
OBJECTS = 1024  # bytes of a conversation's own objects
PREFIX = "conv_"  # of the ids that the server makes
INSTRUCTIONS = ("system", "developer")


class StoredConversation(msgspec.Struct, array_like=True):
    """A conversation in a file, for the next job of a service."""

    created: int
    content: bytes
    metadata: dict[str, str]
    used: float  # Unix time


class Conversation:
    """The messages under one id, of one API key's requests."""

    def __init__(self, key: int, id: str):
        self.key = key
        self.id = id
        self.created = int(time.time())
        self.content = b"[]"  # the items as JSON: the objects that it decodes to take many times the memory
        self.metadata: dict[str, str] = {}
        self.used = time.monotonic()
        self.version = ""  # of the file that it was read from
        self.saved: asyncio.Future[bool] | None = None  # whether what this job has said is in the file
        self.removed = False  # by the client, perhaps while an answer is made

    running = False  # an answer that is being made does not need what is kept

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation as items of /v1/responses."""
        return msgspec.json.decode(self.content)

    @property
    def messages(self) -> list[Message]:
        """The conversation as messages of chats."""
        return messages_of(self.items)

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return OBJECTS + len(self.content) + sum(len(name) + len(value) for name, value in self.metadata.items())

    def body(self) -> dict[str, Any]:
        """OpenAI's conversation object."""
        return {"id": self.id, "object": "conversation", "created_at": self.created, "metadata": self.metadata}

    def with_new(self, messages: list[Message]) -> tuple[list[Message], list[dict[str, Any]]]:
        """Everything up to these, as messages and as items. New instructions at the beginning take the place of the
        earlier ones."""
        earlier, count = self.items, 0
        if messages[0].role in INSTRUCTIONS:
            earlier = [one for one in earlier if one.get("role") not in INSTRUCTIONS]
            count = next((i for i, one in enumerate(messages) if one.role not in INSTRUCTIONS), len(messages))
        first, rest = messages[:count], messages[count:]
        return [*first, *messages_of(earlier), *rest], [*items_of(first), *earlier, *items_of(rest)]


class Turn:
    """An answer that is made in a conversation. Until `release` no other is."""

    def __init__(self, store: ConversationStore, conversation: Conversation):
        self.conversation = conversation
        self._store = store
        self._held = True

    def end(self, items: list[dict[str, Any]]) -> None:
        """The answer is whole: `items` are all of the conversation with it. The client may ask again at once."""
        self._store.end(self.conversation, items)
        self.release()

    def release(self) -> None:
        """No answer is made any more, whether there is one or not."""
        if self._held:
            self._held = False
            self._store.release(self.conversation)


class ConversationStore:
    """At most `most` conversations, of which the ones that were longest not used go first, of the key that has most."""

    def __init__(self, most: int, owners: Sequence[str] = ("",)):
        self.most = most
        self.files: KeptFiles | None = None  # that the job's successors share
        self._owners = owners
        self._kept: SharedStore[tuple[int, str], Conversation] = SharedStore(most, MAX_BYTES)
        self._answered: set[tuple[int, str]] = set()  # in which an answer is being made

    async def load(self, id: str | None, key: int) -> None:
        """Have a conversation as the files have it, which the job before this one may have changed meanwhile.

        One that is not in its file, as the disk is slow or full, stays as it is in memory.
        """
        if self.files is None or id is None or (key, id) in self._answered:
            return
        known = self._kept.get((key, id))
        saved = known.saved if known is not None else None
        if saved is not None and not (saved.done() and saved.result()):
            return
        version = known.version if known is not None else ""
        found = await self.files.get(self._owners[key], id, version, wait=known is None and id.startswith(PREFIX))
        if (key, id) in self._answered or self._kept.get((key, id)) is not known:  # begun or read meanwhile
            return
        if known is not None and known.saved is not saved:  # answered meanwhile
            return
        if found is None:
            self._kept.pop((key, id))
        elif found[1] != version:
            try:
                stored = msgspec.msgpack.decode(found[0], type=StoredConversation)
            except msgspec.DecodeError as error:  # what is in memory, if anything, is better
                log.error("the file of conversation %s is damaged: %s", id[:100], error)
                return
            kept = Conversation(key, id)
            kept.created, kept.content, kept.metadata = stored.created, stored.content, stored.metadata
            kept.used = time.monotonic() - max(0.0, time.time() - stored.used)
            kept.version = found[1]
            self._kept.put((key, id), kept)

    def get(self, id: str, key: int, param: str = "conversation_id") -> Conversation:
        """Raises ApiError 404, also for what came with another API key."""
        self._forget_old()
        kept = self._kept.get((key, id))
        if kept is None:
            why = f"the last {self.most} are kept, for {MAX_AGE / 3600:.0f} hours"
            if not self.most:
                why = "none is kept (--conversation-store 0)"
            raise ApiError(404, f"there is no conversation {id[:100]!r} here: {why}", param, "conversation_not_found")
        return kept

    def create(self, key: int, items: list[dict[str, Any]], metadata: dict[str, str]) -> Conversation:
        """A new conversation, with these items. Raises ApiError 400 or 413."""
        if not self.most:
            raise ApiError(400, "this server keeps no conversations (--conversation-store 0)", code="conversations_off")
        _check_size(items)
        made = Conversation(key, PREFIX + uuid.uuid4().hex[:24])
        made.metadata = metadata
        self.end(made, items)
        return made

    def change(
        self, id: str, key: int, items: list[dict[str, Any]] | None = None, metadata: dict[str, str] | None = None
    ) -> Conversation:
        """Set a conversation's items or its metadata. Raises ApiError 404, 413, and 409 as `begin`."""
        _check_size(items or [])
        turn = self.begin(self.get(id, key).id, key)
        found = turn.conversation
        found.metadata = found.metadata if metadata is None else metadata
        turn.end(found.items if items is None else items)
        return found

    def begin(self, id: str | None, key: int, param: str = "conversation_id") -> Turn:
        """A turn in a conversation, until its `release`; a new conversation where a client's own id is not known.

        Raises ApiError 404 for an id of the server's that is not kept, and 409 where another answer is being made.
        """
        self._forget_old()
        if id is None or (not id.startswith(PREFIX) and (key, id) not in self._kept):
            found = Conversation(key, id or PREFIX + uuid.uuid4().hex[:24])
        else:
            found = self.get(id, key)
        if (key, found.id) in self._answered:
            raise ApiError(
                409,
                f"the conversation {found.id[:100]!r} is being answered: send one request after the other",
                param,
                "conversation_busy",
            )
        self._answered.add((key, found.id))
        return Turn(self, found)

    def release(self, conversation: Conversation) -> None:
        """No answer is made in it any more, whether there is one or not."""
        self._answered.discard((conversation.key, conversation.id))

    def end(self, conversation: Conversation, items: list[dict[str, Any]]) -> None:
        """An answer is whole: `items` are all of the conversation with it."""
        if conversation.removed:
            return
        conversation.content = msgspec.json.encode(items)
        conversation.used = time.monotonic()
        self._kept.put((conversation.key, conversation.id), conversation)
        if self.files is not None:
            conversation.version = ""
            stored = StoredConversation(conversation.created, conversation.content, conversation.metadata, time.time())
            owner = self._owners[conversation.key]
            conversation.saved = self.files.put(owner, conversation.id, msgspec.msgpack.encode(stored))

    async def saved(self, id: str, key: int) -> None:
        """Wait until a conversation is in its file, if there are files; see KeptFiles.saved."""
        if self.files is not None:
            await self.files.saved(self._owners[key], id)

    def remove(self, id: str, key: int) -> None:
        """Forget it. Raises ApiError 404."""
        self.get(id, key).removed = True
        self._kept.pop((key, id))
        if self.files is not None:
            self.files.drop(self._owners[key], id)

    def _forget_old(self) -> None:
        """Forget those whose time is over; they stand in the order of their last use."""
        oldest = time.monotonic() - MAX_AGE
        for one in self._kept:
            if one.used >= oldest:
                return
            self._kept.pop((one.key, one.id))


def _check_size(items: list[dict[str, Any]]) -> None:
    size = len(msgspec.json.encode(items))
    if size > MAX_ADDED:
        raise ApiError(413, f"the items have {size} bytes: a conversation may have {MAX_ADDED}", "items", "too_large")
