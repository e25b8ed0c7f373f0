"""A chat whose conversation the server remembers: the answer is added to it once it is whole."""

from __future__ import annotations

from typing import Any

from .conversation import Call, CustomInput, Function, Message
from .conversation_store import Conversation, ConversationStore
from .openai_format import ChatRenderer
from .schema import ChatRequest
from .session import Session, Update
from .text.events import Answer
from .text.tokenizer import Tokenizer


class RecordedChat(ChatRenderer):
    """One choice. An answer that breaks off leaves the conversation as it was."""

    def __init__(
        self,
        session: Session,
        request: ChatRequest,
        tokenizer: Tokenizer,
        store: ConversationStore,
        conversation: Conversation,
    ):
        """`request` has the messages of the whole conversation, which `store` has let begin."""
        self._store = store
        self._conversation = conversation
        self._answer = Answer()
        self._held = True  # no other answer is made in it
        super().__init__(session, request, tokenizer)

    def about(self, kind: str) -> dict[str, Any]:
        return {**super().about(kind), "conversation_id": self._conversation.id}

    def see(self, updates: list[Update]) -> None:
        for update in updates:
            self._answer.add(update.events)
            if update.finish:
                assert isinstance(self.request, ChatRequest)
                self._store.end(self._conversation, [*self.request.conversation(), self._message()])
                self._release()  # now: the client may ask again as soon as it has the last event

    def _message(self) -> Message:
        answer = self._answer
        calls = [
            Call(id=one.id, type="custom", custom=CustomInput(one.name, one.arguments))
            if one.name in self._custom
            else Call(Function(one.name, one.arguments), one.id)
            for one in answer.calls
        ]
        thoughts = answer.reasoning or None
        return Message("assistant", answer.text, tool_calls=calls or None, reasoning_content=thoughts)

    def close(self) -> None:
        super().close()
        self._release()

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._store.release(self._conversation)
