"""A request while it is answered: its choices, and what each look at the stream adds to them."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from typing import Any

from .. import protocol
from .api_error import ApiError
from .engine_client import Stream
from .generation import Generation
from .prompts import Prompt
from .text.events import Event
from .text.output_parser import OutputParser


class Update:
    """What one look at the stream adds to one choice."""

    __slots__ = ("choice", "events", "tokens", "logprobs", "finish", "first")

    def __init__(self, choice: Choice):
        self.choice = choice
        self.events: list[Event] = []  # in their order
        self.first = not choice.started
        choice.started = True
        self.tokens: list[int] = []
        self.logprobs: list[tuple[protocol.TokenLogprob, int]] = []  # with where the token's text begins
        self.finish = ""  # "stop", "length" or "tool_calls"


class Choice:
    """The state of one sequence."""

    __slots__ = (
        "index",
        "prompt",
        "completion_tokens",
        "reasoning_tokens",
        "prompt_logprobs",
        "cached_tokens",
        "finish",
        "stop_reason",
        "started",
        "_detokenizer",
        "_parser",
        "_offset",
        "_end_tokens",
        "_stop_text",
    )

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        parser: OutputParser,
        detok,
        end_tokens: tuple[int, ...],
        stop_text: Callable[[int], str],
    ):
        self.index = index
        self.prompt = prompt
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.prompt_logprobs: list[protocol.TokenLogprob] = []  # of all tokens but the first
        self.cached_tokens = 0
        self.finish = ""
        self.stop_reason: str | int | None = None  # the stop string, or a stop token that the request named
        self.started = False
        self._parser = parser
        self._detokenizer = detok
        self._offset = len(prompt.echo)
        self._end_tokens = end_tokens
        self._stop_text = stop_text

    def apply(self, delta: protocol.Delta, update: Update) -> None:
        """Add a delta. Nothing after a stop string is shown or counted."""
        parser, feed, events = self._parser, self._detokenizer.feed, update.events
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if update.first and self.prompt.offsets:
            first = protocol.TokenLogprob(self.prompt.tokens[0], math.nan, [])
            update.logprobs += zip([first, *delta.prompt_logprobs], self.prompt.offsets, strict=True)
        if not self.prompt.answer:
            self._end("length", update)
            return
        for i, token in enumerate(delta.tokens):
            text = feed(token)
            self.completion_tokens += 1
            update.tokens.append(token)
            if delta.logprobs:
                update.logprobs.append((delta.logprobs[i], self._offset))
            self._offset += len(text)
            if parser.thinking:
                self.reasoning_tokens += 1
            if text:
                parser.feed(text, events)
                if parser.stopped:
                    self._end("stop", update)
                    return
        if delta.finish:
            text = self._detokenizer.finish()
            if delta.stop_token >= 0:
                text += self._stop_text(delta.stop_token)
                if delta.stop_token not in self._end_tokens:
                    self.stop_reason = delta.stop_token
            if text:
                parser.feed(text, events)
            self._end(delta.finish, update)

    def _end(self, finish: str, update: Update) -> None:
        parser = self._parser
        parser.finish(update.events)  # may find a stop string in what was held back
        if parser.stopped:
            finish = "stop"
            self.stop_reason = parser.stop_string or self.stop_reason
        if parser.calls and finish == "stop":
            finish = "tool_calls"
        self.finish = update.finish = finish


class Session:
    """A generation that was handed to rank 0. Iterating yields lists of updates, at most one for each choice."""

    def __init__(self, model: str, generation: Generation, fingerprint: str = ""):
        self.id = uuid.uuid4().hex[:24]
        self.model = model
        self.fingerprint = fingerprint  # of all that answers depend on besides the request
        self.prompts = generation.prompts
        self.created = int(time.time())
        self.start = time.monotonic()
        self.first_token = 0.0  # when it came, on the clock of `start` ...
        self.last_token = 0.0  # ... and when all choices had ended
        self.choices: list[Choice] = []
        self._by_id: dict[str, Choice] = {}
        self._stream: Stream | None = None

    def open(self, stream: Stream, choices: dict[str, Choice]) -> None:
        self._stream = stream
        self._by_id = choices
        self.choices = list(choices.values())

    def __aiter__(self) -> Session:
        return self

    async def __anext__(self) -> list[Update]:
        assert self._stream is not None
        deltas = await self._stream.__anext__()
        updates: dict[str, Update] = {}
        for delta in deltas:
            choice = self._by_id[delta.id]
            if choice.finish:  # it met a stop string; these tokens were on their way
                continue
            if delta.finish == "error":
                self.close()
                raise ApiError(delta.status or 500, delta.error or "the engine failed on this request")
            update = updates.get(delta.id)
            if update is None:
                update = updates[delta.id] = Update(choice)
            choice.apply(delta, update)
            if choice.finish and not delta.finish:
                self._stream.abort([delta.id])
        if not self.first_token and any(update.tokens or update.finish for update in updates.values()):
            self.first_token = time.monotonic()
        if not self._stream.open:
            self.last_token = time.monotonic()
        return list(updates.values())

    def close(self) -> None:
        """Free what is still running; the client has gone, or nothing more is wanted."""
        if self._stream is not None:
            self._stream.abort()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object for what was done so far."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        per_prompt = len(self.choices) // len(self.prompts)  # the others of a prompt hit its own blocks
        cached = sum(choice.cached_tokens for choice in self.choices[::per_prompt])
        reasoning = sum(choice.reasoning_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }
