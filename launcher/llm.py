"""The library: `LLM(DIR, np=2).generate(prompts, SamplingParams(…))` in any Python program.

The ranks are a supervised job of their own processes; this one does what a server process would, the session code
and the socket to rank 0, on an asyncio loop in a thread. However this process ends, the job ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from .. import errors
from ..rank.options import Options
from ..rank.protocol import TokenLogprob
from ..rank.server.api_error import ApiError
from ..rank.server.batch.admission import Admission, enough
from ..rank.server.config import SamplingDefaults, ServerConfig
from ..rank.server.decoding import convert
from ..rank.server.engine_client import EngineClient
from ..rank.server.generation import Make, chat_generation, completion_generation
from ..rank.server.openai_format import tool_call
from ..rank.server.schema import ChatRequest, Common, CompletionRequest
from ..rank.server.session import Session
from ..rank.server.text.events import Answer
from ..rank.server.text_engine import TextEngine
from .job import linux, mpi_env, server_process, supervisor
from .options import option_sources
from .options.resolve import resolve

T = TypeVar("T")
Prompt = str | Sequence[int]

# Options of a server: here nothing listens, and whoever calls sees the failure and can start again.
_SERVER_ONLY = (
    "host", "port", "api_key", "api_key_file", "tls_cert", "tls_key", "strict", "queue_size", "access_log", "restarts",
    "served_model_name", "requests_per_key", "idle_exit", "allowed_origins", "allowed_hosts", "response_store",
)  # fmt: skip
DRAIN_PATIENCE = 5.0


class JobError(RuntimeError):
    """The job that computes has ended; `code` is its exit code (docs/exit-codes.md)."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How answers are sampled and when they end. None: the model's generation_config.json, then OpenAI's default."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None  # None: as long as the model's context allows
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None  # of the sampled token and this many of the likeliest
    priority: int | None = None


class Completion(msgspec.Struct):
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] | None = None


class Output(msgspec.Struct):
    """The answers to one prompt; the properties are those of the first."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    usage: dict[str, Any]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs


class LLM:
    """A model on its ranks. Options are those of `phalanx serve`, by the names of their flags: LLM(DIR, np=2, tp=2).

    Close it, or use it in a `with` statement; it closes itself at the interpreter's end.
    """

    def __init__(self, model: str = "", **options: Any):
        given = {name.replace("-", "_"): value for name, value in options.items()}
        for name in _SERVER_ONLY:
            if name in given:
                raise ValueError(f"LLM has no argument {name!r}: it is for `phalanx serve`")
        environ = {name: value for name, value in os.environ.items() if name[8:].lower() not in _SERVER_ONLY}
        place = mpi_env.rank_place(os.environ)
        if place is not None and place.size > 1:
            raise ValueError(f"LLM starts its own ranks: run this program without {place.launcher}")
        try:
            if model:
                given["model"] = model
            chosen = option_sources.from_keywords(Options, given, environ, "LLM")
            self.options = resolve(chosen, None)
        except errors.FatalError as stop:
            raise ValueError(str(stop)) from None
        self._host = _Host(self.options)
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
        bodies = [
            {"prompt": prompt if isinstance(prompt, str) else [int(token) for token in prompt], **fields}
            for prompt, fields in zip(listed, _fields(sampling_params, len(listed)), strict=True)
        ]
        return self._host.answer(bodies, CompletionRequest, completion_generation)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[Output]:
        """Answer a conversation, or each of several; `fields` are more fields of a chat request, such as tools."""
        single = len(messages) > 0 and isinstance(messages[0], dict)
        listed: list[Any] = [messages] if single else list(messages)
        bodies = []
        for conversation, chosen in zip(listed, _fields(sampling_params, len(listed)), strict=True):
            if (likeliest := chosen.pop("logprobs", None)) is not None:
                chosen |= {"logprobs": True, "top_logprobs": likeliest}
            bodies.append({"messages": list(conversation), **chosen, **fields})
        return self._host.answer(bodies, ChatRequest, chat_generation)

    def close(self) -> None:
        """End the job. Further calls raise."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fields(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[dict[str, Any]]:
    """One dictionary of request fields for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts: give one, or one for each prompt")
    return [msgspec.to_builtins(one, str_keys=True) for one in params]


class _Host:
    """The loop's thread, the socket to rank 0 and the supervisor's process. Knows no LLM, so that one can be freed."""

    def __init__(self, options: Options):
        self.options = options
        self._pid = os.getpid()  # a forked child has a copy of this object, but not the job
        self._closed = False
        self._directory = server_process.job_directory()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="phalanx", daemon=True)
        self._thread.start()
        defaults = {name: getattr(options, name) for name in SamplingDefaults.__struct_fields__}
        config = ServerConfig(
            model_dir=options.model,
            link=os.path.join(self._directory, "lead"),
            listen_fd=-1,
            sampling=SamplingDefaults(**defaults),
            generation_config="auto" if options.generation_config else "none",
            chat_template=options.chat_template,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            thinking=options.thinking,
        )
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Listen, start the job, and wait until it is ready."""
        self._run(self._listen())
        order = supervisor.SupervisorRequest(self.options, self._config.link, os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phalanx.launcher.job.supervisor"],
            env=os.environ | {supervisor.REQUEST_ENV: msgspec.json.encode(order).decode()},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None,
            process_group=0,  # Ctrl-C is for this program to handle
        )
        self._run(self._ready())

    async def _listen(self) -> None:
        self._link = EngineClient(self._config.link)
        self._sessions = TextEngine(self._link, self._config)
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._link.listen()

    async def _ready(self) -> None:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        fd = linux.pidfd(self._process.pid)

        def died() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            self._died.set_result(None)

        loop.add_reader(fd, died)
        try:
            await self._sessions.load()
        except (OSError, ValueError) as error:
            raise ValueError(f"the tokenizer in {self.options.model} cannot be read: {error}") from None
        ready = asyncio.ensure_future(self._link.wait_ready())
        ends: list[asyncio.Future[Any]] = [ready, self._died]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done() or ready.exception() is not None:
            ready.cancel()
            raise await self._death()

    async def _death(self) -> JobError:
        """Why the job ended, once it has."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._died), 10)
        assert self._process is not None
        code = self._process.poll()
        code = errors.RANK_FAILED if code is None else supervisor.exit_code(code)
        fatal = self._link.fatal
        why = fatal.message if fatal is not None else supervisor.NAMES.get(code, "see the messages above")
        return JobError(f"the job ended with exit code {code}: {why}", code)

    def answer(self, bodies: list[dict[str, Any]], kind: type[Common], make: Make) -> list[Output]:
        if self._closed or self._pid != os.getpid():
            raise RuntimeError("this LLM is closed" if self._closed else "this LLM belongs to the parent process")
        try:
            requests = [convert(body, kind) for body in bodies]
            return self._run(self._answer_all(requests, make))
        except ApiError as error:
            raise ValueError(error.message) from None

    async def _answer_all(self, requests: list[Common], make: Make) -> list[Output]:
        ready = self._link.ready
        if ready is None:
            raise await self._death()
        room = Admission(enough(ready.max_num_seqs))  # what waits beyond that waits here
        tasks = [asyncio.ensure_future(self._answer(request, make, room)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except ApiError as error:
            if error.status == 503:
                raise await self._death() from None
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, request: Common, make: Make, room: Admission) -> Output:
        taken = await room.take(request.sequences())
        try:
            with contextlib.closing(await self._sessions.generate(request, make)) as session:
                return await _collect(session, request.likeliest() >= 0)
        finally:
            room.give(taken)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: the ranks stop computing what nobody waits for
            raise

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        child = self._process
        if child is not None and child.poll() is None:
            if self._link.state == "ready":
                self._loop.call_soon_threadsafe(self._link.drain)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(DRAIN_PATIENCE)
            for _ in range(2):  # the first asks, the second insists
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(0.2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(DRAIN_PATIENCE)
            child.kill()
            child.wait()
        with contextlib.suppress(Exception):
            self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DRAIN_PATIENCE)
        if not self._thread.is_alive():
            self._loop.close()
        server_process.remove(self._directory)

    async def _end(self) -> None:
        self._link.close()
        self._sessions.close()


def _has_fileno(stream: Any) -> bool:
    """Notebooks and test runners replace stderr by what is no file."""
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


async def _collect(session: Session, logprobs: bool) -> Output:
    """All that a session produces."""
    found = {
        choice.index: Completion(choice.index, "", [], "", logprobs=[] if logprobs else None)
        for choice in session.choices
    }
    answers = {choice.index: Answer() for choice in session.choices}
    async for updates in session:
        for update in updates:
            one = found[update.choice.index]
            answers[update.choice.index].add(update.events)
            one.token_ids += update.tokens
            if one.logprobs is not None:
                one.logprobs += [entry for entry, _ in update.logprobs]
    for choice in session.choices:
        one, answer = found[choice.index], answers[choice.index]
        one.text, one.reasoning, one.tool_calls = answer.text, answer.reasoning, list(map(tool_call, answer.calls))
        one.finish_reason, one.stop_reason = choice.finish, choice.stop_reason
    return Output(session.prompts[0].tokens, list(found.values()), session.usage())
