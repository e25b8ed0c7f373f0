"""One request: text or token ids become step.Requests, deltas become events (text, reasoning, tool calls) and counts.

HTTP, the library and batch jobs all use this; none of it knows about HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from .. import protocol
from .api_error import ApiError
from .config import ServerConfig
from .engine_client import EngineClient, Stream
from .prompts import (
    Prompt,
    chat_prompt,
    check_number,
    check_values,
    completion_prompts,
    context_of,
    embedding_inputs,
    size,
)
from .sampling_params import SEED_MASK, max_tokens, resolve_defaults, sampling
from .schema import ChatRequest, CompletionRequest, EmbeddingRequest
from .text.events import Event
from .text.load import Text
from .text.output_parser import OutputParser
from .text.tokenizer import detokenizer

log = logging.getLogger(__name__)
LARGE = 1 << 17  # characters of a request's texts, which take about a tenth of a second
LARGE_BODY = 1 << 20  # bytes; reading it as JSON may hold up the event loop
TRIM_AFTER = 0.5  # seconds from a large request to when its memory goes back: its objects may live on for a moment


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
    """A request that was handed to the lead. Iterating yields lists of updates, at most one for each choice."""

    def __init__(self, id: str, model: str, request: ChatRequest | CompletionRequest, prompts: list[Prompt]):
        self.id = id
        self.model = model
        self.request = request
        self.prompts = prompts
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


class TextEngine:
    """Opens sessions: what all requests share."""

    def __init__(self, link: EngineClient, config: ServerConfig):
        self.link = link
        self.config = config
        self.names = config.names()
        self.text: Text | None = None
        self.defaults: dict[str, Any] = {}
        self._ids = itertools.count()
        # Tokenising a long prompt takes tens of milliseconds, which the streams of others should not feel. A very long
        # one takes seconds and 200 bytes of memory a character: one at a time, in order, where no short one waits
        # behind it. They wait instead of being refused, as a batch job would take a refusal for an answer.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-text")
        self._tokenising = 0  # requests in the pools
        self._trim: asyncio.TimerHandle | None = None

    async def load(self) -> None:
        """Read the tokenizer and its companions. Raises OSError or ValueError where they cannot be read."""
        config = self.config
        loop = asyncio.get_running_loop()
        self.text = await loop.run_in_executor(
            self._pool, Text, config.model_dir, config.generation_config, config.chat_template
        )
        self.defaults = resolve_defaults(config.sampling, self.text.generation)
        if self.text.template is not None and self.text.template.takes_tools and self.text.tool_format is None:
            log.warning("the model writes tool calls in a way that is not known here: they stay in the answer's text")

    def close(self) -> None:
        if self._trim is not None:
            self._trim.cancel()
        for pool in (self._pool, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    def ready(self) -> tuple[Text, protocol.Ready]:
        """What a request needs. Raises ApiError 503 where it is not there yet, or no longer."""
        link = self.link
        if link.state != "ready" or link.ready is None:
            raise link.unavailable()
        if self.text is None:
            raise ApiError(
                503, "the tokenizer is still loading; try again in a few seconds", code="loading", retry_after=1
            )
        return self.text, link.ready

    def check_model(self, name: str | None) -> None:
        """With `strict`, only the served names are answered."""
        if self.config.strict and name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {', '.join(self.names)}",
                "model",
                "model_not_found",
            )

    def check_body(self, body: bytes) -> None:
        """Refuse a body of too many values before it is decoded."""
        if len(body) > LARGE_BODY:
            check_values(body, context_of(self.ready()[1]))

    async def chat(self, request: ChatRequest) -> Session:
        """Start a chat completion."""
        self.check_model(request.model)
        text, ready = self.ready()
        check_number(len(request.messages), context_of(ready))
        prompt = await self._run(ready, chat_prompt, text, request, ready, self.config.thinking)
        return self._start("chatcmpl-", request, [prompt], text, ready)

    async def completion(self, request: CompletionRequest) -> Session:
        """Start a completion of one or several prompts."""
        self.check_model(request.model)
        text, ready = self.ready()
        prompts = await self._run(ready, completion_prompts, text, request, ready)
        return self._start("cmpl-", request, prompts, text, ready)

    async def embedding(self, request: EmbeddingRequest) -> tuple[list[list[int]], str]:
        """Token ids of each input, for which there is room in the queue, and how the model pools them."""
        self.check_model(request.model)
        text, ready = self.ready()
        prompts = await self._run(ready, embedding_inputs, text, request, ready)
        self._admit(len(prompts), ready.max_num_seqs)
        return prompts, request.embedding_type or text.pooling

    def next_id(self) -> str:
        """Of a sequence; short, as it travels with every delta."""
        return f"{next(self._ids):x}"

    async def _run(self, ready: protocol.Ready, function, text: Text, request, *args):
        """Call a function in a pool. A request has its place in the queue from here on, or is refused now.

        One that is cancelled while it waits there is not tokenised.
        """
        self._admit(1, ready.max_num_seqs)
        large = size(request) > LARGE
        self._tokenising += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._large if large else self._pool, function, text, request, *args
            )
        finally:
            self._tokenising -= 1
            if large:
                self.trim_soon()

    async def in_pool(self, function, *args):
        """Call a function that takes long where the streams of others do not feel it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def trim_soon(self) -> None:
        """Give back what a large request took: malloc keeps it otherwise, hundreds of megabytes for a text of a few."""
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(TRIM_AFTER, self._begin_trim)

    def _begin_trim(self) -> None:
        self._trim = None
        with contextlib.suppress(RuntimeError):  # the pool was shut down in the meantime
            self._pool.submit(trim)

    def _start(
        self,
        prefix: str,
        request: ChatRequest | CompletionRequest,
        prompts: list[Prompt],
        text: Text,
        ready: protocol.Ready,
    ) -> Session:
        context = context_of(ready)
        n = request.n or 1
        self._admit(n * len(prompts), ready.max_num_seqs)
        session = Session(prefix + uuid.uuid4().hex[:24], self.names[0], request, prompts)
        # A special token has no text, so a stop string that names one is matched by its id.
        named = [text.tokenizer.added.get(stop) for stop in request.stops()]
        stop_tokens = [token for token in named if token is not None and token in text.tokenizer.special]
        requests: list[protocol.Request] = []
        choices: dict[str, Choice] = {}
        for prompt in prompts:
            limit = max_tokens(request, self.defaults["max_tokens"], len(prompt.tokens), context)
            shared = sampling(request, self.defaults, text.end_tokens, stop_tokens, ready.vocab_size, limit)
            packed = protocol.pack_u32(prompt.tokens)
            for j in range(n):
                own = msgspec.structs.replace(shared, seed=(shared.seed + j) & SEED_MASK) if j else shared
                id = self.next_id()
                requests.append(protocol.Request(id, packed, own, request.priority or 0, request.cache_salt or ""))
                choices[id] = self._choice(len(choices), prompt, request, text)
        session.open(self.link.submit(requests), choices)
        return session

    def _admit(self, count: int, max_num_seqs: int) -> None:
        open_now = self.link.open_sequences + self._tokenising
        limit = max_num_seqs + self.config.queue_size
        if open_now and open_now + count > limit:
            raise ApiError(
                429,
                f"the queue is full: {open_now} sequences are open and {count} more would exceed "
                f"{limit}; try again later",
                code="queue_full",
                retry_after=1,
            )

    def _choice(self, index: int, prompt: Prompt, request: ChatRequest | CompletionRequest, text: Text) -> Choice:
        tokenizer, keep_stop = text.tokenizer, bool(request.include_stop_str_in_output)
        reasoning = tool_format = None
        parallel = True
        if isinstance(request, ChatRequest):
            reasoning = text.reasoning
            parallel = request.parallel_tool_calls is not False
            if request.tools and request.tool_choice != "none":
                tool_format = text.tool_format
        skip: frozenset[int] = frozenset()
        if request.skip_special_tokens is not False:
            markers = (*(reasoning or ()), *((*tool_format.opens, *tool_format.markers) if tool_format else ()))
            # The parser has to see the markers that the model was given as special tokens.
            skip = tokenizer.special - {tokenizer.added[text] for text in markers if text in tokenizer.added}
        parser = OutputParser(request.stops(), keep_stop, reasoning, prompt.thinking, tool_format, parallel)
        return Choice(
            index,
            prompt,
            parser,
            detokenizer(tokenizer, skip, prompt.tokens[-16:]),
            text.end_tokens,
            lambda token: tokenizer.piece(token).decode(errors="replace") if keep_stop else "",
        )


def trim() -> None:
    """Hand free memory back to the system, where the C library can (glibc)."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
