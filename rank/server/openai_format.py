"""Renders a session's events in OpenAI's shapes: whole objects, and the chunks of a stream as JSON bytes.

A chunk that only adds text is assembled from prepared bytes: at thousands of tokens a second that is most of the
server process's work.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Any

from .. import protocol
from .custom_tools import custom_names
from .json_line import encode
from .renderer import Renderer
from .schema import ChatRequest, CompletionRequest
from .session import Choice, Session, Update
from .text.events import Answer, Event, Reasoning, Text, ToolCall, ToolCallArguments, ToolCallStart
from .text.tokenizer import TokenTable

LOWEST = -9999.0  # in place of -inf, which JSON does not have


def _logprob(value: float) -> float | None:
    """None of a prompt's first token, which nothing precedes."""
    return None if math.isnan(value) else max(value, LOWEST)


def token_text(tokenizer: TokenTable, token: int) -> tuple[str, bytes]:
    """A token's text and its bytes."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode(), piece
    except UnicodeDecodeError:  # part of a character: its bytes, so that two such tokens have two names
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece), piece


def logprob_entry(entry: protocol.TokenLogprob, name: Callable[[int], tuple[str, bytes]]) -> dict[str, Any]:
    """A token's log probability with the top log probabilities. name: maps a token to its text and bytes."""

    def one(token: int, value: float) -> dict[str, Any]:
        text, piece = name(token)
        return {"token": text, "logprob": _logprob(value), "bytes": list(piece)}

    return {**one(entry.token, entry.logprob), "top_logprobs": [one(token, value) for token, value in entry.top]}


def tool_call(call: ToolCall, custom: bool = False) -> dict[str, Any]:
    """An entry of tool_calls; of a custom tool, the arguments are its input."""
    if custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class _Collected:
    """All that one choice has produced."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.tokens: list[int] = []
        self.logprobs: list[tuple[protocol.TokenLogprob, int]] = []

    def add(self, update: Update) -> None:
        self.answer.add(update.events)
        self.tokens += update.tokens
        self.logprobs += update.logprobs


class OpenAiRenderer(Renderer):
    """The renderer's parts that chat completions and completions share."""

    prefix: str  # of ids
    whole: str  # the `object` field of a whole answer ...
    part: str  # ... and of a chunk

    def __init__(self, session: Session, request: ChatRequest | CompletionRequest, tokenizer: TokenTable):
        super().__init__(session)
        self.request = request
        self.tokenizer = tokenizer
        self.id = self.prefix + session.id
        options = request.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self.token_ids = bool(request.return_token_ids)
        # The general way is needed where a chunk carries more than text.
        self._simple = not (self.token_ids or self.continuous_usage or request.likeliest() >= 0)
        self._head = b"data: " + encode(self.about(self.part))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def about(self, kind: str) -> dict[str, Any]:
        """The first fields of a whole answer and of each chunk; `kind` is its `object`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.session.created,
            "model": self.session.model,
            "system_fingerprint": self.session.fingerprint,
        }

    def see(self, updates: list[Update]) -> None:
        """Called with all updates before they are shown."""

    # Fields that the endpoints fill in.

    def text_chunk(self, index: int, event: Event) -> bytes | None:
        """The choice's JSON for an update of this event alone; None for events that are not mere text."""
        raise NotImplementedError

    def parts(self, update: Update) -> list[dict[str, Any]]:
        """The choice's JSON objects for an update, without index and finish_reason."""
        raise NotImplementedError

    def body(self, choice: Choice, answer: Answer) -> dict[str, Any]:
        """The choice's message or text in a whole answer."""
        raise NotImplementedError

    def logprobs(self, entries: list[tuple[protocol.TokenLogprob, int]]) -> dict[str, Any] | None:
        raise NotImplementedError

    # Streams.

    async def stream(self) -> AsyncIterator[bytes]:
        async for updates in self.session:
            self.see(updates)
            if data := self.chunks(updates):
                yield data
        yield self.last()

    def chunks(self, updates: list[Update]) -> bytes:
        """The events for these updates; empty where there is nothing to show yet."""
        chunks: list[bytes] = []
        for update in updates:
            events, text = update.events, None
            if self._simple and len(events) == 1 and not update.finish and not update.first:
                text = self.text_chunk(update.choice.index, events[0])
            if text is not None:
                chunks += (self._head, text, self._tail)
            else:
                chunks += self._general(update)
        return b"".join(chunks)

    def _general(self, update: Update) -> list[bytes]:
        parts = self.parts(update)
        if not parts and (update.finish or update.logprobs or (self.token_ids and update.tokens)):
            parts = [self._empty_part()]
        events = []
        # Token ids and log probabilities go once, with the text of their tokens; what only ends a chat comes after it.
        carrier = len(parts) - 1 - (len(parts) > 1 and parts[-1] == self._empty_part())
        for i, part in enumerate(parts):
            choice: dict[str, Any] = {"index": update.choice.index, **part, "logprobs": None, "finish_reason": None}
            if i == carrier:
                choice["logprobs"] = self.logprobs(update.logprobs)
                if self.token_ids:
                    choice["token_ids"] = update.tokens
            if i == len(parts) - 1 and update.finish:
                choice["finish_reason"] = update.finish
                choice["stop_reason"] = update.choice.stop_reason
            if i == 0 and update.first and self.token_ids:
                choice["prompt_token_ids"] = list(update.choice.prompt.tokens)
            events.append(self._chunk([choice]))
        return events

    def _empty_part(self) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        if usage is None and self.continuous_usage:
            usage = self.session.usage()
        tail = self._tail if usage is None else b'],"usage":' + encode(usage) + b"}\n\n"
        return self._head + encode(choices)[1:-1] + tail

    def last(self) -> bytes:
        """The events that close a stream."""
        usage = self._chunk([], self.session.usage()) if self.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    # Whole answers.

    async def collect(self) -> dict[str, Any]:
        """Wait for all choices; the endpoint's answer object."""
        session = self.session
        collected = {choice.index: _Collected() for choice in session.choices}
        async for updates in session:
            self.see(updates)
            for update in updates:
                self.hold_logprobs(entry for entry, _ in update.logprobs)
                collected[update.choice.index].add(update)
        choices = []
        for choice in session.choices:
            got = collected[choice.index]
            entry = {
                "index": choice.index,
                **self.body(choice, got.answer),
                "logprobs": self.logprobs(got.logprobs),
                "finish_reason": choice.finish,
                "stop_reason": choice.stop_reason,
            }
            if self.token_ids:
                entry["token_ids"] = got.tokens
                entry["prompt_token_ids"] = list(choice.prompt.tokens)
            if self.request.prompt_logprobs is not None:
                self.hold_logprobs(choice.prompt_logprobs)
                entry["prompt_logprobs"] = self._prompt_logprobs(choice)
            choices.append(entry)
        return {**self.about(self.whole), "choices": choices, "usage": session.usage(), **self.of_prompt(choices)}

    def of_prompt(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields of a whole answer that are about its prompt."""
        return {}

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None]:
        """The prompt's log-probabilities as vLLM writes them: an object for each token but the first, by token ids."""
        found: list[dict[str, Any] | None] = [None]
        for entry in choice.prompt_logprobs:
            likely = entry.top[: self.request.prompt_likeliest()]
            ranks = {token: rank for rank, (token, _) in enumerate(likely, 1)}
            values = dict([*likely, (entry.token, entry.logprob)])
            found.append(
                {
                    str(token): {
                        "logprob": _logprob(value),
                        "rank": ranks.get(token),
                        "decoded_token": token_text(self.tokenizer, token)[0],
                    }
                    for token, value in values.items()
                }
            )
        return found

    def _token_name(self, token: int) -> tuple[str, bytes]:
        """How a token is named in log probabilities, and its bytes."""
        text, piece = token_text(self.tokenizer, token)
        return f"token_id:{token}" if self.request.return_tokens_as_token_ids else text, piece


class ChatRenderer(OpenAiRenderer):
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, session: Session, request: ChatRequest, tokenizer: TokenTable):
        super().__init__(session, request, tokenizer)
        self._shows_reasoning = request.shows_reasoning()
        self._custom = custom_names(request.tools)
        self._inputs: set[tuple[int, int]] = set()  # calls of custom tools, by the numbers of choice and call

    def text_chunk(self, index: int, event: Event) -> bytes | None:
        if isinstance(event, Text):
            delta = b'"content":' + encode(event.text)
        elif isinstance(event, Reasoning) and self._shows_reasoning:
            text = encode(event.text)
            delta = b'"reasoning_content":' + text + b',"reasoning":' + text
        else:
            return None
        return b'{"index":%d,"delta":{' % index + delta + b'},"logprobs":null,"finish_reason":null}'

    def parts(self, update: Update) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if update.first:
            deltas.append({"role": "assistant", "content": ""})
        for event in update.events:
            if isinstance(event, Text):
                deltas.append({"content": event.text})
            elif isinstance(event, Reasoning) and self._shows_reasoning:
                deltas.append({"reasoning_content": event.text, "reasoning": event.text})
            elif isinstance(event, ToolCallStart):
                custom = event.name in self._custom
                if custom:
                    self._inputs.add((update.choice.index, event.index))
                call = tool_call(ToolCall(event.id, event.name), custom)
                deltas.append({"tool_calls": [{"index": event.index, **call}]})
            elif isinstance(event, ToolCallArguments):
                more: dict[str, Any] = {"function": {"arguments": event.text}}
                if (update.choice.index, event.index) in self._inputs:
                    more = {"custom": {"input": event.text}}
                deltas.append({"tool_calls": [{"index": event.index, **more}]})
        if update.finish:
            deltas.append({})
        return [{"delta": delta} for delta in deltas]

    def _empty_part(self) -> dict[str, Any]:
        return {"delta": {}}

    def of_prompt(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chat has one prompt: vLLM's clients look for its fields next to the choices."""
        names = ("prompt_logprobs", "prompt_token_ids")
        return {name: choices[0][name] for name in names if name in choices[0]}

    def body(self, choice: Choice, answer: Answer) -> dict[str, Any]:
        content = answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if (reasoning := answer.reasoning) and self._shows_reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if answer.calls:
            message["content"] = content if content.strip() else None
            message["tool_calls"] = [tool_call(call, call.name in self._custom) for call in answer.calls]
        return {"message": message}

    def logprobs(self, entries: list[tuple[protocol.TokenLogprob, int]]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        content = [logprob_entry(entry, self._token_name) for entry, _ in entries]
        return {"content": content, "refusal": None}


class TextRenderer(OpenAiRenderer):
    """/v1/completions."""

    prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"

    def text_chunk(self, index: int, event: Event) -> bytes | None:
        if not isinstance(event, Text):
            return None
        return b'{"index":%d,"text":' % index + encode(event.text) + b',"logprobs":null,"finish_reason":null}'

    def parts(self, update: Update) -> list[dict[str, Any]]:
        text = "".join(event.text for event in update.events if isinstance(event, Text))
        if update.first:
            text = update.choice.prompt.echo + text
        return [{"text": text}] if text or update.finish else []

    def _empty_part(self) -> dict[str, Any]:
        return {"text": ""}

    def body(self, choice: Choice, answer: Answer) -> dict[str, Any]:
        return {"text": choice.prompt.echo + answer.text}

    def logprobs(self, entries: list[tuple[protocol.TokenLogprob, int]]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        return {
            "tokens": [self._token_name(entry.token)[0] for entry, _ in entries],
            "token_logprobs": [_logprob(entry.logprob) for entry, _ in entries],
            "top_logprobs": [None if math.isnan(entry.logprob) else self._top(entry) for entry, _ in entries],
            "text_offset": [offset for _, offset in entries],
        }

    def _top(self, entry: protocol.TokenLogprob) -> dict[str, float | None]:
        # The sampled token is always among them, as OpenAI documents it.
        limit = None if self.request.logprob_token_ids else self.request.logprobs
        top = {self._token_name(token)[0]: _logprob(value) for token, value in entry.top[:limit]}
        top.setdefault(self._token_name(entry.token)[0], _logprob(entry.logprob))
        return top
