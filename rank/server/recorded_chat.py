"""A chat whose conversation the server remembers: the answer is added to it once it is whole."""

from __future__ import annotations

from typing import Any

from .conversation import Call, CustomInput, Function, Message
from .conversation_store import Turn
from .openai_format import ChatRenderer
from .responses_request import items_of
from .schema import ChatRequest
from .session import Session, Update
from .text.events import Answer
from .text.tokenizer import TokenTable


class RecordedChat(ChatRenderer):
    """One choice. An answer that breaks off leaves the conversation as it was."""

    def __init__(
        self,
        session: Session,
        request: ChatRequest,
        tokenizer: TokenTable,
        turn: Turn,
        items: list[dict[str, Any]],
    ):
        """items: the whole conversation, whose messages `request` has."""
        self._turn = turn
        self._asked = items
        self._answer = Answer()
        super().__init__(session, request, tokenizer)

    def about(self, kind: str) -> dict[str, Any]:
        return {**super().about(kind), "conversation_id": self._turn.conversation.id}

    def see(self, updates: list[Update]) -> None:
        for update in updates:
            self._answer.add(update.events)
            if update.finish:
                self._turn.end([*self._asked, *items_of([self._message()])])

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
        self._turn.release()
