"""Renders a session's events as Anthropic's messages: whole, and as the events of a stream in their order.

https://docs.anthropic.com/en/api/messages, https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Protocol

from .api_error import ApiError, PromptTooLong
from .items import Change, Item, Items
from .renderer import Renderer, sse
from .session import Session, Update
from .text.events import Reasoning

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def rfc3339(seconds: float) -> str:
    """A time as Anthropic writes it."""
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as Anthropic's clients expect it. Agents look for these very words about a long
    prompt, and shorten it then."""
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.tokens} tokens > {error.context - 1} maximum"
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class Asked(Protocol):
    """The parts of a request that the answer depends on."""

    max_tokens: int

    @property
    def thinks(self) -> bool:
        """Whether thoughts are wanted."""


class MessageRenderer(Renderer):
    """/v1/messages. There is one choice."""

    def __init__(self, session: Session, request: Asked, tokenizer: object):
        super().__init__(session)
        self._limit = request.max_tokens
        self._thinks = request.thinks
        self._items = Items()

    async def collect(self) -> dict[str, Any]:
        async for updates in self.session:
            for update in updates:
                self._add(update)
        return self._message([_whole(item) for item in self._items.all]) | self._stop() | {"usage": self._usage()}

    async def stream(self) -> AsyncIterator[bytes]:
        async for updates in self.session:
            data = b"".join(part for update in updates for part in self._parts(update))
            if data:
                yield data

    def error(self, error: ApiError) -> bytes:
        return sse("error", **{key: value for key, value in error_body(error).items() if key != "type"})

    def _add(self, update: Update) -> list[Change]:
        """Thoughts that were not asked for are left out: clients take the first block for the text."""
        events = update.events
        return self._items.add(events if self._thinks else [one for one in events if not isinstance(one, Reasoning)])

    def _parts(self, update: Update) -> list[bytes]:
        parts = []
        if update.first:
            started = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
            parts.append(sse("message_start", message=started))
        changes = self._add(update)
        if update.finish:
            changes += self._items.finish()
        parts += [_event(change) for change in changes]
        if update.finish:
            parts.append(sse("message_delta", delta=self._stop(), usage=self._usage()))
            parts.append(sse("message_stop"))
        return parts

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        session = self.session
        return {
            "id": "msg_" + session.id,
            "type": "message",
            "role": "assistant",
            "model": session.model,
            "content": content,
        }

    def _stop(self) -> dict[str, Any]:
        (choice,) = self.session.choices
        if choice.finish == "stop" and isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        if choice.finish == "length" and choice.completion_tokens < self._limit:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        # A session that was closed before its end, as the client left, has no reason.
        return {"stop_reason": STOP_REASONS.get(choice.finish), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts cached tokens separately from the rest of the input."""
        (choice,) = self.session.choices
        return {
            "input_tokens": self.session.prompt_tokens - choice.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached_tokens,
            "output_tokens": choice.completion_tokens,
        }


def _whole(item: Item) -> dict[str, Any]:
    """A content block."""
    if item.kind == "text":
        return {"type": "text", "text": item.text}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    try:
        arguments = json.loads(item.text or "{}")
    except (ValueError, RecursionError):  # the output ended within the call
        arguments = {}
    return {
        "type": "tool_use",
        "id": item.id,
        "name": item.name,
        "input": arguments if isinstance(arguments, dict) else {},
    }


def _event(change: Change) -> bytes:
    item = change.item
    if change.what == "begin":
        return sse(
            "content_block_start", index=item.index, content_block=_whole(Item(item.kind, 0, item.id, item.name))
        )
    if change.what == "end":
        end = sse("content_block_stop", index=item.index)
        if item.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": ""}
            return sse("content_block_delta", index=item.index, delta=signature) + end
        return end
    delta = {
        "text": {"type": "text_delta", "text": change.text},
        "reasoning": {"type": "thinking_delta", "thinking": change.text},
        "call": {"type": "input_json_delta", "partial_json": change.text},
    }[item.kind]
    return sse("content_block_delta", index=item.index, delta=delta)
