"""One request: text or token ids become protocol.Requests, deltas become events (text, reasoning, calls) and counts.

HTTP, the library and batch jobs all use this; none of it knows about HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from .. import heap, protocol, vision
from ..gguf import checkpoint
from ..vision import Spelling
from . import tracing
from .api_error import ApiError
from .blocking import Lanes
from .config import ServerConfig
from .decoding import nested_too_deeply
from .engine_client import EngineClient
from .generation import Generation, LoadedModel, Make, Unchecked
from .images import ImageReader, Place, ShownPixels, images_of, text_only
from .prompts import Prompt
from .sampling_params import SEED_MASK, resolve_defaults
from .schema import ChatRequest
from .session import Choice, Session
from .text import tool_formats
from .text.load import TextSettings
from .text.model_files import read_json
from .text.spelled import SpelledMarkers
from .text.tokenizer import detokenizer
from .text_process import RemoteText
from .version import version

log = logging.getLogger(__name__)
LARGE = 1 << 17  # characters of a request's texts, which take about a tenth of a second
THREADS = 4  # that have prompts written: one whose template is slow keeps few others waiting
LARGE_THREADS = 2  # that have large prompts written, one of a key at a time
CHECKERS = 4  # threads that have grammars checked
TRIM_AFTER = 0.5  # seconds from a large request to when its memory goes back: its objects may live on for a moment

Made = TypeVar("Made")


class Sized(Protocol):
    """A request as `prepare` needs it."""

    model: str | None

    def characters(self) -> int:
        """Nearly how many are to be tokenised."""


class TextEngine:
    """One model's text side: what all its requests share."""

    def __init__(self, link: EngineClient, config: ServerConfig, model: int = 0, options: str = ""):
        """model, options: of one of several models its number, and what rank 0 needs to load it."""
        self.model = model
        self.options = options
        self.link = link
        self.config = config
        self.names = config.names()
        self.text: RemoteText | None = None
        self._images: ImageReader | None = None
        self.defaults: dict[str, Any] = {}
        self._ids = itertools.count()
        # Tokenising a long prompt takes tens of milliseconds, which the streams of others should not feel. A very long
        # one takes seconds and 200 bytes of memory a character: a key has one at a time, in order, where no short one
        # waits behind it. They wait instead of being refused, as a batch job would take a refusal for an answer.
        keys = min(2, max(1, len(config.api_keys)))  # of several, each has half of the threads
        self._prompts = Lanes(THREADS, THREADS // keys, "text")
        self._large = Lanes(LARGE_THREADS, 1, "large-text")
        self._checkers = Lanes(CHECKERS, CHECKERS // keys, "grammars")
        self._tokenising = 0  # requests in the pools
        self._trim: asyncio.TimerHandle | None = None

    async def load(self) -> None:
        """Read the tokenizer and its companions. Raises FatalError, OSError or ValueError where they cannot be
        read."""
        config = self.config
        text, self._images = await self._prompts.run("", self._read)
        self.text = text
        self.defaults = resolve_defaults(config.sampling, text.generation)
        if text.family:
            log.warning(
                "the model has no chat template, so it looks like a base model, which continues texts: use "
                "/v1/completions. Chats are written as the %s family does; --chat-template sets another",
                text.family,
            )
        if text.tool_format is tool_formats.find("json") and config.tool_call_parser == "auto":
            log.warning(
                "how the model writes tool calls is not known: objects in JSON that name a tool are read as calls; "
                "--tool-call-parser sets the format"
            )

    def _read(self) -> tuple[RemoteText, ImageReader | None]:
        config = self.config
        parsers = config.tool_call_parser, config.reasoning_parser
        text = RemoteText(TextSettings(config.model_dir, config.generation_config, config.chat_template, *parsers))
        said = model_config(config)
        size = said.get("vocab_size", (said.get("text_config") or {}).get("vocab_size"))
        # The first request should not wait for this. Rank 0 has the last word, and refuses sizes that cannot be.
        if isinstance(size, int) and 2 * size > text.tokenizer.end:
            text.within(size)
        rules = vision.find(Path(config.model_dir), said) if config.images_per_prompt else None
        return text, None if rules is None else ImageReader(config, rules)

    @property
    def takes_tools(self) -> bool:
        """Whether the model's chat template shows it tools."""
        return self.text is not None and self.text.takes_tools

    @property
    def image_limits(self) -> dict[str, int] | None:
        """ImageReader's limits; None: the model takes no images, or is not loaded."""
        ready = self.link.ready
        if self._images is None or ready is None or ready.model != self.model:
            return None
        return self._images.limits(ready)

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: equal where seeds give equal answers, as far as this process knows."""
        ready = self.link.ready
        parts = (version(), self.names[0], self.config.model_dir, ready.ranks if ready else 0)
        return "fp_" + blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        if self._trim is not None:
            self._trim.cancel()
        for lanes in (self._prompts, self._large, self._checkers):
            lanes.pool.shutdown(wait=False, cancel_futures=True)
        if self.text is not None:
            self.text.close()
        if self._images is not None:
            self._images.close()

    def ready(self) -> tuple[RemoteText, protocol.Ready]:
        """The text engine and model that a request needs. Raises ApiError 503 if they are not ready."""
        link = self.link
        if link.state != "ready" or link.ready is None:
            raise link.unavailable()
        if link.ready.model != self.model:
            raise ApiError(503, f"the model {self.names[0]} is not loaded any more", code="unloaded", retry_after=1)
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

    async def generate(self, request: Sized, make: Make, owner: str = "") -> Session:
        """Start what `make` gives for a request. owner: whose it is, as Call.owner has it."""
        shown: list[ShownPixels] = []
        made = await self.prepare(request, make, owner, shown)
        pixels = shown[0] if shown else None
        generation = made if isinstance(made, Generation) else await self._checked(made, owner)
        return self._start(generation, owner, pixels)

    async def _checked(self, unchecked: Unchecked, owner: str) -> Generation:
        """The Generation, once its grammar is checked."""
        self._tokenising += 1
        try:
            return await self._checkers.run(owner, unchecked)
        finally:
            self._tokenising -= 1

    async def prepare(
        self, request: Sized, make: Callable[[LoadedModel, Any], Made], owner: str = "",
        shown: list[ShownPixels] | None = None,
    ) -> Made:  # fmt: skip
        """The result of `make`, called in a pool. The request has its place in the queue from here on, or is
        refused now. One that is cancelled while it waits there is not tokenised. shown: gets the pixels of its images.
        """
        self.check_model(request.model)
        text, ready = self.ready()
        self.admit(1)
        if places := images_of(request):
            request = await self._read_images(request, places, owner, shown)
        elif self._images is not None and ready.images:
            self._images.check_needed(request)
        large = request.characters() > LARGE

        def made() -> Made:
            return make(LoadedModel(text.within(ready.vocab_size), ready, self.defaults, self.config.thinking), request)

        self._tokenising += 1
        try:
            return await (self._large if large else self._prompts).run(owner, made)
        except RecursionError:  # schemas and arguments are walked level by level, deeper than JSON is read
            raise nested_too_deeply() from None
        finally:
            self._tokenising -= 1
            if large:
                self.trim_soon()

    async def _read_images(
        self, request: Sized, places: list[Place], owner: str, shown: list[ShownPixels] | None
    ) -> ChatRequest:
        """The request with its images as tokens."""
        _, ready = self.ready()
        if self._images is None or not ready.images:
            raise text_only(places[0])
        assert isinstance(request, ChatRequest)
        self._tokenising += 1
        try:
            request, found = await self._images.read(request, places, owner, ready.image_pixels)
        finally:
            self._tokenising -= 1
        if shown is not None:
            shown.append(found)
        return request

    def next_id(self) -> str:
        """The id of a new sequence; short, as it travels with every delta."""
        return f"{next(self._ids):x}"

    async def in_pool(self, owner: str, work: Callable[[], Made]) -> Made:
        """Do some work of a request that takes long where the streams of others do not feel it."""
        return await self._prompts.run(owner, work)

    def trim_soon(self) -> None:
        """Give back what a large request took: malloc keeps it otherwise, hundreds of megabytes for a text of a few."""
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(TRIM_AFTER, self._begin_trim)

    def _begin_trim(self) -> None:
        self._trim = None
        with contextlib.suppress(RuntimeError):  # the pool was shut down in the meantime
            self._prompts.pool.submit(heap.trim)

    def _start(self, generation: Generation, owner: str, pixels: ShownPixels | None = None) -> Session:
        text, _ = self.ready()
        n = generation.n
        self.admit(n * len(generation.prompts))
        session = Session(self.names[0], generation, self.fingerprint)
        session.pixels = pixels
        requests: list[protocol.Request] = []
        choices: dict[str, Choice] = {}
        for prompt, shared in zip(generation.prompts, generation.sampling, strict=True):
            packed, prediction = protocol.pack_u32(prompt.tokens), protocol.pack_u32(prompt.prediction)
            for j in range(n):
                own = msgspec.structs.replace(shared, seed=(shared.seed + j) & SEED_MASK) if j else shared
                id = self.next_id()
                rest = generation.priority, generation.cache_salt, generation.grammar
                owned = owner if generation.grammar else ""
                shown = prompt.pictures, list(pixels or ())  # every choice's request has them
                if prompt.read:
                    of = {"digest": prompt.pictures[0].digest, "text": prompt.read}
                    shown = prompt.pictures, [msgspec.structs.replace(one, **of) for one in shown[1]]
                requests.append(protocol.Request(id, packed, own, *rest, owned, prediction, *shown))
                choices[id] = _choice(len(choices), prompt, generation, text, own, self._images)
            prompt.tokens = protocol.unpack_u32(packed)
        if pixels is not None:
            pixels.clear()
        session.open(self.link.submit(requests, generation.vocabulary), choices)
        if (trace := tracing.current()) is not None:
            trace.sessions.append(session)
        return session

    def admit(self, count: int) -> None:
        """Raises ApiError 429 where the queue has no room for so many sequences more."""
        open_now = self.link.open_sequences + self._tokenising
        limit = self.ready()[1].max_num_seqs + self.config.queue_size
        if open_now and open_now + count > limit:
            raise ApiError(
                429,
                f"the queue is full: {open_now} sequences are open and {count} more would exceed "
                f"{limit}; try again later",
                code="queue_full",
                retry_after=1,
            )


def model_config(config: ServerConfig) -> dict[str, Any]:
    """config.json of a model with its tower."""
    path = Path(config.model_dir)
    return checkpoint.config(path, Path(config.mmproj)) if config.mmproj else read_json(path, "config.json")


def _choice(
    index: int, prompt: Prompt, generation: Generation, text: RemoteText, sampling: protocol.SamplingParams,
    images: ImageReader | None,
) -> Choice:  # fmt: skip
    tokenizer, keep_stop = text.tokenizer, generation.keep_stop
    detok: Spelling = detokenizer(tokenizer, generation.skip, prompt.tokens[-16:])
    if sampling.heads and images is not None:
        detok = images.rules.spelling(sampling.heads)
    return Choice(
        index,
        prompt,
        generation.parser(prompt),
        SpelledMarkers(detok, generation.markers) if generation.markers else detok,
        text.end_tokens,
        lambda token: tokenizer.piece(token).decode(errors="replace") if keep_stop else "",
        sampling.min_tokens,
    )
