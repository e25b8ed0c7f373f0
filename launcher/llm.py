"""The library: `LLM(DIR, np=2).generate(prompts, SamplingParams(…))` in any Python program; AsyncLLM streams.

The ranks are a supervised job of their own processes; this one does what a server process would, the session code
and the socket to rank 0, on an asyncio loop in a thread (llm_host.py). However this process ends, the job ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from .. import errors
from ..rank.flags import SERVER
from ..rank.options import Options, specs
from ..rank.server.generation import chat_generation, completion_generation
from ..rank.server.schema import ChatRequest, CompletionRequest
from .image_parts import with_image_urls
from .job import mpi_env
from .llm_host import Fields, JobError, JobHost
from .llm_types import Completion, Message, Output, Piece, Prompt, SamplingParams
from .options import option_sources
from .options.resolve import resolve

__all__ = ["LLM", "AsyncLLM", "Completion", "JobError", "Message", "Output", "Piece", "Prompt", "SamplingParams"]

# Here nothing listens, and whoever calls sees the failure and can start again.
_SERVER = [name for name, spec in specs().items() if SERVER in spec.flag.scope]


class LLM:
    """A model on its ranks. Options are those of `phalanx serve`, by the names of their flags: LLM(DIR, np=2, tp=2).

    The constructor returns once the model is loaded. It raises ValueError for wrong options and JobError where the job
    has ended. Close it, or use it in a `with` statement; it closes itself at the interpreter's end. Its methods may be
    called from several threads.
    """

    def __init__(self, model: str = "", **options: Any):
        self.options = _options(model, options, "LLM")
        self._host = JobHost(self.options)
        self._finalizer = weakref.finalize(self, self._host.close)
        try:
            self._host.start()
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Continue each prompt, a text or token ids; one Output for each, in their order."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: list[Any] = [prompts] if single else list(prompts)
        pairs = zip(listed, _one_each(sampling_params, len(listed)), strict=True)
        bodies = [_completion(prompt, params) for prompt, params in pairs]
        return self._host.answer(bodies, CompletionRequest, completion_generation)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[Output]:
        """Answer a conversation, or each of several; `fields` are more fields of a chat request, such as tools."""
        single = len(messages) > 0 and isinstance(messages[0], dict)
        listed: list[Any] = [messages] if single else list(messages)
        pairs = zip(listed, _one_each(sampling_params, len(listed)), strict=True)
        bodies = [_chat(conversation, params, fields) for conversation, params in pairs]
        return self._host.answer(bodies, ChatRequest, chat_generation)

    def close(self) -> None:
        """End the job. Further calls raise RuntimeError."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLLM:
    """An LLM for programs with an asyncio loop, and answers as they are made. One call is one prompt.

    `async with AsyncLLM(DIR, np=2) as llm:` starts and ends the job. The loop stays free meanwhile. A call that is
    cancelled stops computing.
    """

    def __init__(self, model: str = "", **options: Any):
        self.options = _options(model, options, "AsyncLLM")
        self._host = JobHost(self.options)
        self._finalizer = weakref.finalize(self, self._host.close)

    async def start(self) -> None:
        """Start the job, once, and wait until the model is loaded. Raises JobError where the job has ended."""
        try:
            await asyncio.to_thread(self._host.start)
        except BaseException:
            await self.close()
            raise

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Output:
        """Continue a text or token ids."""
        body = _completion(prompt, sampling_params)
        return (await self._host.answer_async([body], CompletionRequest, completion_generation))[0]

    async def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> Output:
        """Answer a conversation; `fields` are more fields of a chat request, such as tools."""
        body = _chat(messages, sampling_params, fields)
        return (await self._host.answer_async([body], ChatRequest, chat_generation))[0]

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Continue a text or token ids: deltas as they come, of all answers where n is above 1."""
        body = _completion(prompt, sampling_params)
        async with contextlib.aclosing(
            self._host.stream_async(body, CompletionRequest, completion_generation)
        ) as found:
            async for piece in found:
                yield piece

    async def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> AsyncGenerator[Piece, None]:
        """Answer a conversation: deltas as they come."""
        body = _chat(messages, sampling_params, fields)
        async with contextlib.aclosing(self._host.stream_async(body, ChatRequest, chat_generation)) as found:
            async for piece in found:
                yield piece

    async def close(self) -> None:
        """End the job. Further calls raise RuntimeError."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _options(model: str, options: dict[str, Any], caller: str) -> Options:
    """The options that the job is started with. Raises ValueError."""
    given = {name.replace("-", "_"): value for name, value in options.items()}
    for name in _SERVER:
        if name in given:
            raise ValueError(f"{caller} has no argument {name!r}: it is for `phalanx serve`")
    environ = {name: value for name, value in os.environ.items() if name[8:].lower() not in _SERVER}
    place = mpi_env.rank_placement(os.environ)
    if place is not None and place.size > 1:
        raise ValueError(f"{caller} starts its own ranks: run this program without {place.launcher}")
    if model:
        given["model"] = model
    try:
        return resolve(option_sources.from_keywords(Options, given, environ, caller), None)
    except errors.FatalError as stop:
        raise ValueError(str(stop)) from None


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts: give one, or one for each prompt")
    return list(params)


def _fields(params: SamplingParams | None) -> Fields:
    fields: Fields = msgspec.to_builtins(params or SamplingParams(), str_keys=True)
    return fields


def _completion(prompt: Prompt, params: SamplingParams | None) -> Fields:
    """A completion's request."""
    return {"prompt": prompt if isinstance(prompt, str) else [int(token) for token in prompt], **_fields(params)}


def _chat(messages: Sequence[Message], params: SamplingParams | None, more: Fields) -> Fields:
    """A chat's request."""
    fields = _fields(params)
    if (likeliest := fields.pop("logprobs", None)) is not None:
        fields |= {"logprobs": True, "top_logprobs": likeliest}
    return {"messages": [with_image_urls(message) for message in messages], **fields, **more}
