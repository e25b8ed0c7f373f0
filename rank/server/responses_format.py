"""Renders a session's events as OpenAI's responses: the whole object, and the events of a stream in their order.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from .api_error import ApiError
from .custom_tools import is_custom
from .items import Change, Item, Items
from .mcp.request_tools import RequestTools
from .renderer import Renderer, sse
from .responses_request import ResponsesRequest, TextOptions
from .responses_tools import server_events, server_item
from .schema import ReasoningOptions
from .session import Session, Update

ENDED = ("completed", "incomplete", "failed", "cancelled")
DELTAS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}


class ResponseRenderer(Renderer):
    """/v1/responses. There is one choice. `on_end` is called once the response is as it stays."""

    def __init__(self, session: Session, request: ResponsesRequest, stored: bool, tools: RequestTools | None = None):
        super().__init__(session)
        self.id = "resp_" + session.id
        self.status = "in_progress"
        self.on_end: Callable[[], None] = lambda: None
        self._request = request
        self._stored = stored
        self._items = Items()
        self._tools = tools  # of tool servers
        self._custom = {tool.get("name") for tool in request.tools or () if is_custom(tool)}
        for label in tools.lists if tools is not None else ():
            self._items.add_tools(label)
        self._error: dict[str, str] | None = None
        self._number = 0  # of the next event

    # The object.

    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        request, session = self._request, self.session
        reasoning = request.reasoning or ReasoningOptions()
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": session.created,
            "status": self.status,
            "background": bool(request.background),
            "error": self._error,
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": session.model,
            "output": self.output(),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "store": self._stored,
            "temperature": request.temperature,
            "text": (request.text or TextOptions()).shown(),
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._usage() if self.status in ENDED else None,
            "user": request.user,
        }

    def output(self) -> list[dict[str, Any]]:
        """The output items so far."""
        return [self._item(item) for item in self._items.all]

    def _of_server(self, item: Item) -> bool:
        """Whether it is a tool server's: the list of its tools, or a call."""
        return item.kind == "tools" or (
            item.kind == "call" and self._tools is not None and item.name in self._tools.offered
        )

    def _item(self, item: Item, begins: bool = False) -> dict[str, Any]:
        last = item is self._items.all[-1]
        status = "completed" if not last or self.status == "completed" else "incomplete"
        status = "in_progress" if begins else status if self.status in ENDED else "completed"
        text = "" if begins else item.text
        own = f"{self.session.id}{item.index}"
        if self._tools is not None and self._of_server(item):
            return server_item(item, own, text, status, self._tools)
        if self._kind(item) == "custom":
            return {
                "type": "custom_tool_call",
                "id": f"ctc_{own}",
                "call_id": item.id,
                "name": item.name,
                "input": text,
                "status": status,
            }
        if item.kind == "call":
            return {
                "type": "function_call",
                "id": f"fc_{own}",
                "call_id": item.id,
                "name": item.name,
                "arguments": text,
                "status": status,
            }
        content = [] if begins else [_part(item, text)]
        if item.kind == "reasoning":
            return {"type": "reasoning", "id": f"rs_{own}", "summary": [], "content": content, "status": status}
        return {"type": "message", "id": f"msg_{own}", "role": "assistant", "content": content, "status": status}

    def _kind(self, item: Item) -> str:
        """The item's kind, of the calls those of custom tools apart."""
        return "custom" if item.kind == "call" and item.name in self._custom else item.kind

    def _usage(self) -> dict[str, Any]:
        used = self.session.usage()
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }

    # Its life.

    async def collect(self) -> dict[str, Any]:
        async for updates in self.session:
            for update in updates:
                self._items.add(update.events)
                self._see_end(update)
        if self.status in ENDED:  # not where the client left
            self.on_end()
        return self.body()

    async def stream(self) -> AsyncIterator[bytes]:
        async for events in self.events():
            yield b"".join(events)

    async def events(self) -> AsyncIterator[list[bytes]]:
        """The events; each one's place among all is its sequence_number."""
        listed, self._items.all = self._items.all, []  # none is there when it begins
        yield [self._event(f"response.{name}", response=self.body()) for name in ("created", "in_progress")]
        self._items.all = listed
        if listed:
            yield [event for item in listed for event in self._events_of(Change("result", item))]
        async for updates in self.session:
            events = [event for update in updates for event in self._changes(update)]
            if self.status in ENDED:
                self.on_end()
                events.append(self._event(f"response.{self.status}", response=self.body()))
            if events:
                yield events

    def error(self, error: ApiError) -> bytes:
        """The last event of one that failed."""
        self.fail(error)
        return self._event("response.failed", response=self.body())

    def fail(self, error: ApiError) -> None:
        self.status = "failed"
        self._error = {"code": "server_error", "message": error.message}

    def cancel(self) -> None:
        """It ends as far as it has come."""
        if self.status not in ENDED:
            self.status = "cancelled"

    def _see_end(self, update: Update) -> None:
        if update.finish:
            self.status = "incomplete" if update.finish == "length" else "completed"

    def _changes(self, update: Update) -> list[bytes]:
        changes = self._items.add(update.events)
        self._see_end(update)
        if update.finish:
            changes += self._items.finish()
        return [event for change in changes for event in self._events_of(change)]

    def _events_of(self, change: Change) -> list[bytes]:
        item = change.item
        if self._tools is not None and self._of_server(item):
            whole = self._item(item, begins=change.what == "begin")
            return [self._event(name, **more) for name, more in server_events(change, whole)]
        whole = self._item(item, begins=change.what == "begin")
        place = {"item_id": whole["id"], "output_index": item.index}
        if item.kind != "call":
            place["content_index"] = 0
        more: dict[str, Any] = {"logprobs": []} if item.kind == "text" else {}
        if change.what == "grow":
            return [self._event(f"{DELTAS[self._kind(item)]}.delta", **place, **more, delta=change.text)]
        outer = {"output_index": item.index, "item": whole}
        if change.what == "begin":
            events = [self._event("response.output_item.added", **outer)]
            if item.kind != "call":
                events.append(self._event("response.content_part.added", **place, part=_part(item, "")))
            return events
        if item.kind == "call":
            whole_text = {"name": item.name, "arguments": item.text}
            if self._kind(item) == "custom":
                whole_text = {"input": item.text}
            done = self._event(f"{DELTAS[self._kind(item)]}.done", **place, **whole_text)
            return [done, self._event("response.output_item.done", **outer)]
        return [
            self._event(f"{DELTAS[item.kind]}.done", **place, **more, text=item.text),
            self._event("response.content_part.done", **place, part=_part(item, item.text)),
            self._event("response.output_item.done", **outer),
        ]

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = sse(name, sequence_number=self._number, **fields)
        self._number += 1
        return event


def _part(item: Item, text: str) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
