"""The messages so far, and how the next one is made: an answer, and the calls of tools that it asks for."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from .... import errors
from ... import find_server
from ...tool_thread import DENIED, ToolThread
from .display import Display

MAX_ROUNDS = 16  # answers with calls of tools, one after the other
BROKEN_OFF = "ended the answer before it was whole: its log says why, if it is yours"
Message = dict[str, Any]


class Conversation:
    """fields: of requests, apart from the messages; None leaves the choice to the server."""

    def __init__(
        self,
        server: find_server.FoundServer,
        display: Display,
        fields: dict[str, Any],
        system: str,
        tools: ToolThread | None,
        approve: bool,
    ):
        self.server = server
        self.fields = fields
        self.system = system
        self.messages: list[Message] = []
        self.files: list[tuple[str, str]] = []  # names and texts that go along with the next message
        self.images: list[str] = []  # URLs that do
        self.context = 0  # tokens that prompt and answer may have; 0: not known
        self.usage: Message | None = None  # of the last answer
        self._display = display
        self._tools = tools
        self._approve = approve

    def say(self, text: str) -> None:
        """A message of the user, and the answer to it. Without an answer the message is dropped."""
        files = "".join(f"`{name}`:\n\n~~~~\n{content}\n~~~~\n\n" for name, content in self.files)
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        content = [*shown, {"type": "text", "text": files + text}] if shown else files + text
        self._exchange([{"role": "user", "content": content}])
        self.files, self.images = [], []

    def again(self) -> None:
        """Another answer to the last message of the user."""
        last = self.undo()
        if last is None:
            raise errors.FatalError("there is nothing to answer again", errors.USAGE)
        self._exchange([last])

    def undo(self) -> Message | None:
        """Forget the last message of the user, and what came after it."""
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at]["role"] == "user":
                last = self.messages[at]
                del self.messages[at:]
                return last
        return None

    def _exchange(self, messages: list[Message]) -> None:
        before = len(self.messages)
        self.messages += messages
        try:
            for rounds in range(MAX_ROUNDS + 1):
                offered = self._tools.functions() if self._tools is not None and rounds < MAX_ROUNDS else []
                answer = self._answer(offered)
                self.messages.append(answer)
                if self._tools is None or not answer.get("tool_calls"):
                    break
                self.messages += [self._called(self._tools, call) for call in answer["tool_calls"]]
        except errors.FatalError:
            del self.messages[before:]
            raise

    def _answer(self, tools: list[Message]) -> Message:
        """Show the answer as it comes; it is the next message."""
        message: Message = {"role": "assistant", "content": ""}
        calls: dict[int, Message] = {}
        began, first, self.usage = time.monotonic(), 0.0, None
        display = self._display
        try:
            for delta in self._stream(tools):
                first = first or time.monotonic()
                if thought := delta.get("reasoning_content"):
                    display.thought(thought)
                if text := delta.get("content"):
                    message["content"] += text
                    display.text(text)
                for part in delta.get("tool_calls") or ():
                    _add(calls, part)
        except errors.FatalError:
            if first:
                display.end()
            raise
        except KeyboardInterrupt:
            display.text(" …")  # the server stops when the connection closes
            if not sys.stdin.isatty():  # nobody is there to ask something else
                display.end()
                raise
            calls = {}
        display.end()
        if self.usage is not None:
            display.note(self._figures(began, first))
        return message | ({"tool_calls": list(calls.values())} if calls else {})

    def _figures(self, began: float, first: float) -> str:
        assert self.usage is not None
        tokens, now = self.usage["completion_tokens"], time.monotonic()
        said = [f"{tokens} tokens", f"first after {first - began:.2f} s"]
        if tokens > 1 and now > first:
            said.insert(1, f"{(tokens - 1) / (now - first):.1f} tokens/s")
        used = self.usage["prompt_tokens"] + tokens
        return ", ".join([*said, f"context {used} of {self.context}" if self.context else f"context {used}"])

    def _called(self, tools: ToolThread, call: Message) -> Message:
        """Make a call, where the user allows it; its result is the next message."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        self._display.thought(f"[{name} {arguments}]")
        self._display.end()
        text = DENIED if self._approve and not _allowed() else tools.call(name, arguments).text
        return {"role": "tool", "tool_call_id": call["id"], "content": text}

    def _stream(self, tools: list[Message]) -> Iterator[Message]:
        """The answer's deltas. `tools: []` leaves out those of the server's tool servers: no one here could call
        them.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: Message = {"messages": [*system, *self.messages], "stream": True, "tools": tools}
        body |= {"stream_options": {"include_usage": True}}
        body |= {name: value for name, value in self.fields.items() if value is not None}
        with find_server.request(self.server, "/v1/chat/completions", body) as answer:
            try:
                yield from self._deltas(answer)
            except (OSError, http.client.HTTPException):
                raise errors.FatalError(f"{self.server.url} {BROKEN_OFF}", errors.ERROR) from None
            except (ValueError, KeyError, TypeError, AttributeError):
                raise errors.FatalError(
                    f"{self.server.url} answers in another format than OpenAI's", errors.ERROR
                ) from None

    def _deltas(self, answer: Iterable[bytes]) -> Iterator[Message]:
        """Events of an answer's lines. Raises FatalError where the answer ends before it is whole."""
        whole = False
        for line in answer:
            if not line.startswith(b"data:"):
                continue
            if line[5:].strip() == b"[DONE]":
                whole = True
                continue
            event = json.loads(line[5:])
            if error := event.get("error"):
                raise errors.FatalError(error["message"] if isinstance(error, dict) else str(error), errors.ERROR)
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                whole = whole or bool(choice.get("finish_reason"))
                yield dict(choice["delta"])
        if not whole:
            raise errors.FatalError(f"{self.server.url} {BROKEN_OFF}", errors.ERROR)


def _allowed() -> bool:
    """Whether the user allows a call; at the end of the input it is denied."""
    try:
        return input("allow this call? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _add(calls: dict[int, Message], part: Message) -> None:
    """A delta of a tool call."""
    call = calls.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] = part.get("id") or call.get("id")
    for name in ("name", "arguments"):
        call["function"][name] += part.get("function", {}).get(name) or ""
