"""One request: text or token ids become step.Requests, deltas become events (text, reasoning, tool calls) and counts.

HTTP, the library and batch jobs all use this; none of it knows about HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from .. import heap, protocol
from .api_error import ApiError
from .config import ServerConfig
from .engine_client import EngineClient
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
from .session import Choice, Session
from .text.load import Text
from .text.output_parser import OutputParser
from .text.tokenizer import detokenizer

log = logging.getLogger(__name__)
LARGE = 1 << 17  # characters of a request's texts, which take about a tenth of a second
LARGE_BODY = 1 << 20  # bytes; reading it as JSON may hold up the event loop
TRIM_AFTER = 0.5  # seconds from a large request to when its memory goes back: its objects may live on for a moment


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
            self._pool.submit(heap.trim)

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
