"""One request: text or token ids become step.Requests, deltas become text, reasoning, tool calls and counts.

HTTP, the library and batch jobs all use this; none of it knows about HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from .. import step
from .config import FrontConfig
from .errors import ApiError
from .link import LeadLink, Stream
from .params import SEED_MASK, max_tokens, resolve_defaults, sampling
from .prompts import Prompt, chat_prompt, completion_prompts, embedding_inputs
from .schema import ChatRequest, CompletionRequest, EmbeddingRequest
from .text.load import Text
from .text.machine import REASONING, Machine, Output
from .text.tokenizer import detokenizer

log = logging.getLogger(__name__)


class Update(Output):
    """What one look at the stream adds to one choice."""

    __slots__ = ("choice", "tokens", "logprobs", "finish", "first")

    def __init__(self, choice: Choice):
        super().__init__()
        self.choice = choice
        self.first = not choice.started
        choice.started = True
        self.tokens: list[int] = []
        self.logprobs: list[tuple[step.TokenLogprob, int]] = []  # with where the token's text begins
        self.finish = ""  # "stop", "length" or "tool_calls"


class Choice:
    """The state of one sequence."""

    __slots__ = ("index", "prompt", "completion_tokens", "reasoning_tokens", "cached_tokens", "finish",
                 "stop_reason", "started", "_detokenizer", "_machine", "_offset", "_end_tokens", "_stop_text")

    def __init__(self, index: int, prompt: Prompt, machine: Machine, detok, end_tokens: tuple[int, ...],
                 stop_text: Callable[[int], str]):
        self.index = index
        self.prompt = prompt
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.finish = ""
        self.stop_reason: str | int | None = None  # the stop string, or a stop token that the request named
        self.started = False
        self._machine = machine
        self._detokenizer = detok
        self._offset = len(prompt.echo)
        self._end_tokens = end_tokens
        self._stop_text = stop_text

    def apply(self, delta: step.Delta, update: Update) -> None:
        """Add a delta. Nothing after a stop string is shown or counted."""
        machine, feed = self._machine, self._detokenizer.feed
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        for i, token in enumerate(delta.tokens):
            text = feed(token)
            self.completion_tokens += 1
            update.tokens.append(token)
            if delta.logprobs:
                update.logprobs.append((delta.logprobs[i], self._offset))
            self._offset += len(text)
            if machine.state == REASONING:
                self.reasoning_tokens += 1
            if text:
                machine.feed(text, update)
                if machine.stopped:
                    self.stop_reason = machine.stop_string
                    self._end("stop", update)
                    return
        if delta.finish:
            text = self._detokenizer.finish()
            if delta.stop_token >= 0:
                text += self._stop_text(delta.stop_token)
                if delta.stop_token not in self._end_tokens:
                    self.stop_reason = delta.stop_token
            if text:
                machine.feed(text, update)
                self.stop_reason = machine.stop_string or self.stop_reason
            self._end("stop" if machine.stopped else delta.finish, update)

    def _end(self, finish: str, update: Update) -> None:
        self._machine.finish(update)
        if self._machine.calls and finish == "stop":
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
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": cached},
                "completion_tokens_details": {"reasoning_tokens": reasoning}}


class Sessions:
    """Opens sessions: what all requests share."""

    def __init__(self, link: LeadLink, config: FrontConfig):
        self.link = link
        self.config = config
        self.names = config.names()
        self.text: Text | None = None
        self.defaults: dict[str, Any] = {}
        self._ids = itertools.count()
        # Tokenising a long prompt takes tens of milliseconds, which the streams of others should not feel.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._tokenising = 0  # requests in the pool

    async def load(self) -> None:
        """Read the tokenizer and its companions. Raises OSError or ValueError where they cannot be read."""
        config = self.config
        loop = asyncio.get_running_loop()
        self.text = await loop.run_in_executor(
            self._pool, Text, config.model_dir, config.generation_config, config.chat_template)
        self.defaults = resolve_defaults(config.sampling, self.text.generation)
        if self.text.template is not None and self.text.template.takes_tools and self.text.syntax is None:
            log.warning("the model writes tool calls in a way that is not known here: they stay in the answer's text")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def ready(self) -> tuple[Text, step.Ready]:
        """What a request needs. Raises ApiError 503 where it is not there yet, or no longer."""
        link = self.link
        if link.state != "ready" or link.ready is None:
            raise link.unavailable()
        if self.text is None:
            raise ApiError(503, "the tokenizer is still loading; try again in a few seconds", code="loading",
                           retry_after=1)
        return self.text, link.ready

    def check_model(self, name: str | None) -> None:
        """With `strict`, only the served names are answered."""
        if self.config.strict and name is not None and name not in self.names:
            raise ApiError(404, f"the model {name!r} does not exist; this server has {', '.join(self.names)}", "model",
                           "model_not_found")

    async def chat(self, request: ChatRequest) -> Session:
        """Start a chat completion."""
        self.check_model(request.model)
        text, ready = self.ready()
        prompt = await self._run(ready, chat_prompt, text, request, ready.vocab_size, self.config.thinking)
        return self._start("chatcmpl-", request, [prompt], text, ready)

    async def completion(self, request: CompletionRequest) -> Session:
        """Start a completion of one or several prompts."""
        self.check_model(request.model)
        text, ready = self.ready()
        prompts = await self._run(ready, completion_prompts, text, request, ready.vocab_size)
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

    async def _run(self, ready: step.Ready, function, *args):
        """Call a function in the pool. A request has its place in the queue from here on, or is refused now."""
        self._admit(1, ready.max_num_seqs)
        self._tokenising += 1
        try:
            return await self.in_pool(function, *args)
        finally:
            self._tokenising -= 1

    async def in_pool(self, function, *args):
        """Call a function that takes long where the streams of others do not feel it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def _start(self, prefix: str, request: ChatRequest | CompletionRequest, prompts: list[Prompt], text: Text,
               ready: step.Ready) -> Session:
        context = min(ready.max_model_len, ready.kv_tokens)
        n = request.n or 1
        self._admit(n * len(prompts), ready.max_num_seqs)
        session = Session(prefix + uuid.uuid4().hex[:24], self.names[0], request, prompts)
        # A special token has no text, so a stop string that names one is matched by its id.
        named = [text.tokenizer.added.get(stop) for stop in request.stops()]
        stop_tokens = [token for token in named if token is not None and token in text.tokenizer.special]
        requests: list[step.Request] = []
        choices: dict[str, Choice] = {}
        for prompt in prompts:
            limit = max_tokens(request, self.defaults["max_tokens"], len(prompt.tokens), context)
            shared = sampling(request, self.defaults, text.end_tokens, stop_tokens, ready.vocab_size, limit)
            packed = step.pack_u32(prompt.tokens)
            for j in range(n):
                own = msgspec.structs.replace(shared, seed=(shared.seed + j) & SEED_MASK) if j else shared
                id = self.next_id()
                requests.append(step.Request(id, packed, own, request.priority or 0, request.cache_salt or ""))
                choices[id] = self._choice(len(choices), prompt, request, text)
        session.open(self.link.submit(requests), choices)
        return session

    def _admit(self, count: int, max_num_seqs: int) -> None:
        open_now = self.link.open_sequences + self._tokenising
        limit = max_num_seqs + self.config.queue_size
        if open_now and open_now + count > limit:
            raise ApiError(429, f"the queue is full: {open_now} sequences are open and {count} more would exceed "
                                f"{limit}; try again later", code="queue_full", retry_after=1)

    def _choice(self, index: int, prompt: Prompt, request: ChatRequest | CompletionRequest, text: Text) -> Choice:
        tokenizer, keep_stop = text.tokenizer, bool(request.include_stop_str_in_output)
        reasoning = syntax = None
        parallel = True
        if isinstance(request, ChatRequest):
            reasoning = text.reasoning
            parallel = request.parallel_tool_calls is not False
            if request.tools and request.tool_choice != "none":
                syntax = text.syntax
        skip: frozenset[int] = frozenset()
        if request.skip_special_tokens is not False:
            markers = (*(reasoning or ()), *((*syntax.opens, syntax.close) if syntax else ()))
            # The machine has to see the markers that the model was given as special tokens.
            skip = tokenizer.special - {tokenizer.added[text] for text in markers if text in tokenizer.added}
        machine = Machine(request.stops(), keep_stop, reasoning, prompt.thinking, syntax, parallel)
        return Choice(index, prompt, machine, detokenizer(tokenizer, skip, prompt.tokens[-16:]), text.end_tokens,
                      lambda token: tokenizer.piece(token).decode(errors="replace") if keep_stop else "")
