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
from .text.events import Event, Text
from .text.output_parser import OutputParser


class Update:
    """The addition of one look at the stream to one choice."""

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
        "drafted",
        "accepted",
        "finish",
        "stop_reason",
        "started",
        "_detokenizer",
        "_parser",
        "_offset",
        "_end_tokens",
        "_stop_text",
        "_min_tokens",
        "_unplaced",
    )

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        parser: OutputParser,
        detok,
        end_tokens: tuple[int, ...],
        stop_text: Callable[[int], str],
        min_tokens: int = 0,
    ):
        """min_tokens: the first tokens, in which no stop string is looked for."""
        self.index = index
        self.prompt = prompt
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.prompt_logprobs: list[protocol.TokenLogprob] = []  # of all tokens but the first
        self.cached_tokens = 0
        self.drafted = self.accepted = 0  # tokens that were guessed, and of these those that were right
        self.finish = ""
        self.stop_reason: str | int | None = None  # the stop string, or a stop token that the request named
        self.started = False
        self._parser = parser
        self._detokenizer = detok
        self._offset = len(prompt.echo)
        self._end_tokens = end_tokens
        self._stop_text = stop_text
        self._min_tokens = min_tokens
        self._unplaced: list[protocol.TokenLogprob] = []  # of tokens whose text the parser holds back

    def apply(self, delta: protocol.Delta, update: Update) -> None:
        """Add a delta. Nothing after a stop string is shown or counted."""
        parser, feed, events = self._parser, self._detokenizer.feed, update.events
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        self.drafted += delta.drafted
        self.accepted += delta.accepted
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if update.first and self.prompt.offsets and not update.logprobs:  # not again for the update's second delta
            first = protocol.TokenLogprob(self.prompt.tokens[0], math.nan, [])
            update.logprobs += zip([first, *delta.prompt_logprobs], self.prompt.offsets, strict=True)
        if not self.prompt.answer:
            self._end("length", update)
            return
        for i, token in enumerate(delta.tokens):
            text = feed(token)
            self.completion_tokens += 1
            if self._min_tokens:
                parser.hold_stops(self.completion_tokens <= self._min_tokens)
            update.tokens.append(token)
            if delta.logprobs:
                update.logprobs.append((delta.logprobs[i], self._offset))
                self._unplaced.append(delta.logprobs[i])
            self._offset += len(text)
            if parser.thinking:
                self.reasoning_tokens += 1
            if text:
                if delta.logprobs:
                    self._feed_with_logprobs(text, events)
                else:
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

    def _feed_with_logprobs(self, text: str, events: list[Event]) -> None:
        """Feed a token's text. Texts that it adds to get the log probabilities of the tokens since the last event."""
        count, size, thinking = len(events), _length(events), self._parser.thinking
        self._parser.feed(text, events)
        self._place_logprobs(events, count, size)
        if self._parser.thinking is not thinking:  # the token was a marker
            self._unplaced = []

    def _place_logprobs(self, events: list[Event], count: int, size: int) -> None:
        """count, size: how many events there were before, and the length of the last one's text."""
        if len(events) == count and _length(events) == size:
            return
        changed = events[count:] if count == 0 or _length(events[:count]) == size else events[count - 1 :]
        texts = [event for event in changed if isinstance(event, Text)]
        if texts:
            texts[-1].logprobs = [*(texts[-1].logprobs or ()), *self._unplaced]
        self._unplaced = []

    def _end(self, finish: str, update: Update) -> None:
        parser, events = self._parser, update.events
        count, size = len(events), _length(events)
        parser.finish(events)  # may find a stop string in what was held back
        if self._unplaced:
            self._place_logprobs(events, count, size)
        if parser.stopped:
            finish = "stop"
            self.stop_reason = parser.stop_string or self.stop_reason
        if parser.calls and finish == "stop":
            finish = "tool_calls"
        self.finish = update.finish = finish


def _length(events: list[Event]) -> int:
    """The length of the last event's text."""
    return len(getattr(events[-1], "text", "")) if events else 0


class Session:
    """A generation that was handed to rank 0. Iterating yields lists of updates, at most one for each choice."""

    # Counts bytes that are held until the answer is over, apart from its text; False where there is no room for them.
    # Whoever reads the session for a client sets another.
    hold: Callable[[int], bool] = staticmethod(lambda size: True)

    def __init__(self, model: str, generation: Generation, fingerprint: str = ""):
        self.id = uuid.uuid4().hex[:24]
        self.model = model
        self.fingerprint = fingerprint  # of all that answers depend on besides the request
        self.prompts = generation.prompts
        self.created = int(time.time())
        self.start = time.monotonic()
        self.submitted = self.start  # when rank 0 got it, on the clock of `start` ...
        self.admitted = 0.0  # ... when a step that computes it was planned first; 0: never ...
        self.first_token = 0.0  # ... when its first token came ...
        self.last_token = 0.0  # ... and when all choices had ended
        self.choices: list[Choice] = []
        self._by_id: dict[str, Choice] = {}
        self._stream: Stream | None = None
        self.pixels: object = None  # of its images, for as long as the session lives

    def open(self, stream: Stream, choices: dict[str, Choice]) -> None:
        self._stream, self.submitted = stream, time.monotonic()
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
            self.admitted = min((delta.admitted for delta in deltas if delta.admitted), default=0.0)
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
        details = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices)}
        if drafted := sum(choice.drafted for choice in self.choices):
            accepted = sum(choice.accepted for choice in self.choices)
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": details,
        }
