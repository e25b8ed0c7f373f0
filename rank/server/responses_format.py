"""Renders a session's events as OpenAI's responses: the whole object, and the events of a stream in their order.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec

from ..protocol import TokenLogprob
from .api_error import ApiError
from .custom_tools import is_custom
from .hosted_tools import FlatTools
from .items import Change, Item, Items
from .mcp.request_tools import RequestTools
from .openai_format import logprob_entry, token_text
from .renderer import Event, LongEvent, Renderer, encoded, sse
from .responses_request import ResponsesRequest, TextOptions
from .responses_tools import server_events, server_item
from .schema import ReasoningOptions
from .session import Session, Update
from .text.events import Text
from .text.tokenizer import TokenTable

ENDED = ("completed", "incomplete", "failed", "cancelled")
DELTAS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}


class ResponseRenderer(Renderer):
    """/v1/responses. There is one choice. `on_end` is called once the response is as it stays."""

    def __init__(
        self,
        session: Session,
        request: ResponsesRequest,
        stored: bool,
        tokenizer: TokenTable,
        flat: FlatTools,
        tools: RequestTools | None = None,
    ):
        """flat: the request's tools as the model sees them."""
        super().__init__(session)
        self.on_close: Callable[[], None] = lambda: None
        self._tokenizer = tokenizer
        self._members = flat.members
        self.id = "resp_" + session.id
        self.status = "in_progress"
        self.on_end: Callable[[], None] = lambda: None
        self._stored = stored
        self._background = bool(request.background)
        self._echo = _echo(request)
        self._final: dict[str, Any] | None = None  # the response as it stays
        self._items = Items()
        self._tools = tools  # of tool servers
        self._custom = {tool.get("name") for tool in flat.tools if is_custom(tool)}
        for label in tools.lists if tools is not None else ():
            self._items.add_tools(label)
        self._error: dict[str, str] | None = None
        self._number = 0  # of the next event

    # The object.

    def body(self) -> dict[str, Any]:
        """The response as it is now. All bodies of it share what is long."""
        if self._final is not None:
            return self._final
        over = self.status in ENDED
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        body = {
            "id": self.id,
            "object": "response",
            "created_at": self.session.created,
            "status": self.status,
            "background": self._background,
            "error": self._error,
            "incomplete_details": incomplete,
            "model": self.session.model,
            "output": _raw(self.output()) if over else self.output(),
            "store": self._stored,
            "truncation": "disabled",
            "usage": self._usage() if over else None,
            **self._echo,
        }
        self._final = body if over else None
        return body

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
                **self._named(item),
                "input": text,
                "status": status,
            }
        if item.kind == "call":
            return {
                "type": "function_call",
                "id": f"fc_{own}",
                "call_id": item.id,
                **self._named(item),
                "arguments": text,
                "status": status,
            }
        content = [] if begins else [self._part(item, text)]
        if item.kind == "reasoning":
            return {"type": "reasoning", "id": f"rs_{own}", "summary": [], "content": content, "status": status}
        return {"type": "message", "id": f"msg_{own}", "role": "assistant", "content": content, "status": status}

    def _named(self, item: Item) -> dict[str, Any]:
        """The name of a called tool, and the namespace that the client has it in."""
        member = self._members.get(item.name)
        return {"name": item.name} if member is None else {"name": member.name, "namespace": member.namespace}

    def _part(self, item: Item, text: str) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs(item.logprobs) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, entries: list[TokenLogprob] | None) -> list[dict[str, Any]]:
        return [logprob_entry(entry, partial(token_text, self._tokenizer)) for entry in entries or ()]

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
                self._add(update)
                self._see_end(update)
        if self.status in ENDED:  # not where the client left
            self.on_end()
        return self.body()

    async def stream(self) -> AsyncIterator[bytes]:
        async for events in self.events():
            yield b"".join(map(encoded, events))

    async def events(self) -> AsyncIterator[list[Event]]:
        """The events; each one's place among all is its sequence_number."""
        listed, self._items.all = self._items.all, []  # none is there when it begins
        yield [self._whole("created"), self._whole("in_progress")]
        self._items.all = listed
        if listed:
            yield [event for item in listed for event in self._events_of(Change("result", item))]
        async for updates in self.session:
            events: list[Event] = [event for update in updates for event in self._changes(update)]
            if self.status in ENDED:
                self.on_end()
                events.append(self._whole(self.status))
            if events:
                yield events

    def error(self, error: ApiError) -> bytes:
        return encoded(self.failed(error))

    def failed(self, error: ApiError) -> Event:
        """The last event of one that failed."""
        self.fail(error)
        return self._whole("failed")

    def fail(self, error: ApiError) -> None:
        self.status, self._final = "failed", None
        self._error = {"code": "server_error", "message": error.message}

    def cancel(self) -> None:
        """It ends as far as it has come."""
        if self.status not in ENDED:
            self.status = "cancelled"

    def _see_end(self, update: Update) -> None:
        if update.finish:
            self.status = "incomplete" if update.finish == "length" else "completed"

    def close(self) -> None:
        super().close()
        self.on_close()

    def _add(self, update: Update) -> list[Change]:
        for event in update.events:
            if isinstance(event, Text) and event.logprobs:
                self.hold_logprobs(event.logprobs)
        return self._items.add(update.events)

    def _changes(self, update: Update) -> list[bytes]:
        changes = self._add(update)
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
        more: dict[str, Any] = {}
        if item.kind == "text":
            more["logprobs"] = self._logprobs(change.logprobs if change.what == "grow" else item.logprobs)
        if change.what == "grow":
            return [self._event(f"{DELTAS[self._kind(item)]}.delta", **place, **more, delta=change.text)]
        outer = {"output_index": item.index, "item": whole}
        if change.what == "begin":
            events = [self._event("response.output_item.added", **outer)]
            if item.kind != "call":
                events.append(self._event("response.content_part.added", **place, part=self._part(item, "")))
            return events
        if item.kind == "call":
            whole_text = {**self._named(item), "arguments": item.text}
            if self._kind(item) == "custom":
                whole_text = {"input": item.text}
            done = self._event(f"{DELTAS[self._kind(item)]}.done", **place, **whole_text)
            return [done, self._event("response.output_item.done", **outer)]
        return [
            self._event(f"{DELTAS[item.kind]}.done", **place, **more, text=item.text),
            self._event("response.content_part.done", **place, part=self._part(item, item.text)),
            self._event("response.output_item.done", **outer),
        ]

    def _whole(self, name: str) -> LongEvent:
        """An event with the whole response."""
        event = LongEvent(f"response.{name}", {"sequence_number": self._number, "response": self.body()})
        self._number += 1
        return event

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = sse(name, sequence_number=self._number, **fields)
        self._number += 1
        return event


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """The request's fields that a response repeats. Texts may be long: they are JSON, in one copy for all bodies."""
    reasoning = request.reasoning or ReasoningOptions()
    return {
        "instructions": _raw(request.instructions),
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": _raw(request.metadata or {}),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": _raw(request.previous_response_id),
        "conversation": _raw({"id": id} if (id := request.conversation_id()) is not None else None),
        "reasoning": _raw({"effort": reasoning.effort, "summary": reasoning.summary}),
        "temperature": request.temperature,
        "text": _raw((request.text or TextOptions()).shown()),
        "tool_choice": _raw("auto" if request.tool_choice is None else request.tool_choice),
        "tools": _raw(request.tools or []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "user": _raw(request.user),
    }
