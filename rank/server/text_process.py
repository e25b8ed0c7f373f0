"""The process in which a model's tokenizer and chat template run, as the server process sees it.

Both come from the model's authors and see what clients write. A template may loop for ever or fill the memory; so may
a tokenizer, by its regular expressions, by replacements that grow a text, or by what its model costs. Neither can be
stopped in a thread. So a process reads them (text_worker.py), and forks workers that do one task at a time:
render a conversation, encode texts. A worker that computes for too long or takes too much memory is ended by the
kernel; its request gets an error, and the next request a new fork, within milliseconds.

The server process itself keeps a table of the tokens' bytes (RemoteText), so answers are read without asking.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import pickle
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import msgspec
import tokenizers

from ...errors import FatalError
from ..fork_server import ForkServer
from ..framed_socket import FramedSocket
from . import blocking
from .api_error import ApiError, PromptTooLong
from .engine_client import STOPPING
from .text import reasoning, tool_formats
from .text.load import ModelText, Text, TextSettings
from .text.tokenizer import TokenTable

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
WAIT = 30.0  # seconds for the process to end a worker
LOOK = 0.05  # seconds between two looks whether the lock is free, where all is to end
PATIENCE = 5  # a worker that does not compute is ended after this many times the limit
KILLS, MEMORY_OF_KILLS = 3, 60.0  # after so many of a key in so many seconds its limit is `seconds_when_killing`


class Limits(msgspec.Struct, frozen=True):
    """Bounds of what a model's files may cost. Processor time counts, so that a busy machine changes nothing."""

    seconds: float = 10.0  # of a request ...
    seconds_when_killing: float = 1.0  # ... of a key of which several were ended lately
    seconds_per_byte: float = 5e-6  # of a request, beside those
    memory: int = 512 << 20  # of a request, in bytes, beside what the process has
    memory_per_byte: int = 400  # encoding takes up to 200 for each
    counted: int = 8 << 20  # bytes of a request that count for these; longer texts are not encoded
    loading_seconds: float = 60.0
    loading_memory: int = 6 << 30


LIMITS = Limits()


class Work(msgspec.Struct, array_like=True):
    """Work for a worker."""

    seconds: float  # of its processor
    call: bytes  # pickled: a function, its arguments and its options


class Answer(msgspec.Struct, array_like=True):
    """A worker's answer: the result, or why there is none."""

    result: bytes = b"\xc0"  # msgpack
    refusal: tuple[int, str, str | None, str | None] | None = None  # an ApiError
    too_long: tuple[str, str, int, int] | None = None  # a PromptTooLong
    exhausted: str = ""  # memory was refused, or a library has given up
    failure: str = ""  # any other exception, with its traceback
    last: bool = False  # the worker does no more work: what it took goes back


class TextFacts(msgspec.Struct):
    """Facts about a model's text files that the server process needs."""

    pieces: list[bytes]
    added: dict[str, int]
    special: list[int]
    size: int
    end: int
    bytewise: bool
    decoding_part: str  # a tokenizer.json, of tokenizers that are not bytewise
    generation: str  # JSON, whose numbers may be any
    end_tokens: tuple[int, ...]
    pooling: str
    tool_format: str
    reasoning: str
    chats: bool
    takes_tools: bool
    family: str


def text_facts(text: Text) -> TextFacts:
    tokenizer = text.tokenizer
    return TextFacts(
        tokenizer.pieces(),
        tokenizer.added,
        sorted(tokenizer.special),
        tokenizer.size,
        tokenizer.end,
        tokenizer.bytewise,
        "" if tokenizer.bytewise else tokenizer.decoding_part(),
        json.dumps(text.generation),
        text.end_tokens,
        text.pooling,
        next((name for name in tool_formats.names() if tool_formats.find(name) is text.tool_format), ""),
        next((name for name in reasoning.names() if reasoning.find(name) is text.reasoning), ""),
        text.chats,
        text.takes_tools,
        text.family,
    )


def encode(text: Text, one: str, add_special_tokens: bool) -> list[int]:
    return text.tokenizer.encode(one, add_special_tokens)


def decode(text: Text, ids: Sequence[int], skip_special_tokens: bool) -> str:
    return text.tokenizer.decode(ids, skip_special_tokens)


def token_id(text: Text, token: str) -> int | None:
    return text.tokenizer.token_id(token)


class _Worker:
    """A fork of the process: it does one task at a time."""

    def __init__(self, number: int, sock: socket.socket):
        self.number = number
        self.messages = FramedSocket(sock, Answer)

    def ended(self) -> bool:
        """Whether it was ended while it had nothing to do, as by a system without memory."""
        self.messages.socket.setblocking(False)
        return self.messages.receive() is None

    def do(self, work: Work) -> Answer | None:
        """None: it has ended. Raises TimeoutError where it takes too long."""
        self.messages.socket.settimeout(work.seconds * PATIENCE)
        self.messages.send(work)
        while (answers := self.messages.receive()) is not None:
            if answers:
                return answers[0]
        return None


class TextProcess:
    """Starts the process and hands it work. Safe to use from several threads; each has a worker of its own."""

    MODULE = "text_worker"
    WORKS = "the model's tokenizer or chat template"  # what its workers run, for messages

    def __init__(self, settings: Any, limits: Limits = LIMITS):
        """settings: for the module's `load`. Raises ValueError where the model's files cannot be read, or not within
        the limits."""
        self.limits = limits
        name = f"{self.MODULE.removesuffix('_worker')} process"
        self._server = ForkServer(f"{__package__}.{self.MODULE}", pickle.dumps((settings, limits)), name)
        self._lock = threading.Lock()  # of the fork server
        self._idle: list[_Worker] = []  # its ends are atomic
        self._killed: dict[str, deque[float]] = {}  # when, by key
        self._closed = False
        with self._lock:
            self._start()

    @property
    def pid(self) -> int:
        return self._server.pid

    def run(self, function: Callable[Concatenate[Text, P], R], *args: P.args, **options: P.kwargs) -> R:
        """Call a function of a module with the model's text and these arguments, in a worker.

        Raises ApiError as the function does, and where it exceeds the limits.
        """
        killed = self._killed.get(blocking.owner.get(), deque[float]())
        often = len(killed) == KILLS and time.monotonic() - killed[0] < MEMORY_OF_KILLS
        call = pickle.dumps((function, args, options), pickle.HIGHEST_PROTOCOL)
        seconds = self.limits.seconds_when_killing if often else self.limits.seconds
        work = Work(seconds + self.limits.seconds_per_byte * min(len(call), self.limits.counted), call)
        answer = self._answer(work) or self._answer(work, again=True)
        if answer is None:
            raise ApiError(503, f"the process of {self.WORKS} has ended; try again", retry_after=1)
        if answer.too_long is not None:
            raise PromptTooLong(*answer.too_long)
        if answer.refusal is not None:
            raise ApiError(*answer.refusal)
        if answer.exhausted:
            raise self._refusal(f"fails: {answer.exhausted}")
        if answer.failure:
            log.warning("%s failed: %s", self.WORKS, answer.failure)
            raise ApiError(500, f"{self.WORKS} failed: {answer.failure.splitlines()[-1]}")
        return _decoder(function).decode(answer.result)

    def _answer(self, work: Work, again: bool = False) -> Answer | None:
        """A worker's answer. None where it has not ended for its work: with the process, or killed, as by a batch
        system that ends the job or by a kernel without memory. Its own limits end it otherwise. again: a worker has
        ended at this work before, so that a second kill counts against whoever sent it."""
        worker = self._take()
        answer, late = None, False
        try:
            answer = worker.do(work)
        except TimeoutError:
            late = True
        except OSError:  # it has ended
            pass
        except BaseException:
            self._end(worker)
            raise
        if answer is None:
            code = self._end(worker)
            if code in (None, -signal.SIGKILL) and not late:
                if code and again:
                    self._count_kill()
                return None
            if late or code == -signal.SIGPROF:
                raise self._refusal(f"takes more than {work.seconds:.2g} s")
            raise self._refusal(f"takes more than {self.limits.memory >> 20} MiB of memory, or crashes")
        if answer.last:
            self._end(worker)
        else:
            self._idle.append(worker)
        return answer

    def close(self) -> None:
        self._closed = True
        while not self._lock.acquire(timeout=LOOK):  # a thread starts the process again: it may read files for minutes
            self._server.kill()
        try:
            self._stop()
        finally:
            self._lock.release()

    def _refusal(self, what: str) -> ApiError:
        """The error of a request whose worker is lost."""
        if self._closed:
            return ApiError(503, STOPPING, code="draining")
        self._count_kill()
        return self.refused(what)

    def _count_kill(self) -> None:
        self._killed.setdefault(blocking.owner.get(), deque(maxlen=KILLS)).append(time.monotonic())

    def refused(self, what: str) -> ApiError:
        """The error of a request whose work cost too much. what: begins with a verb."""
        log.warning("a request was refused: writing its prompt, or checking its grammar, %s", what)
        return ApiError(
            400,
            f"writing this prompt with the model's chat template and tokenizer {what}: send less, or use another model",
            code="text_limits",
        )

    def _take(self) -> _Worker:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took it
                worker = self._idle.pop()
                if not worker.ended():
                    return worker
                self._end(worker)
        with self._lock:
            if self._closed:
                raise ApiError(503, STOPPING, code="draining")
            try:
                if not self._server.running:
                    self._start()
                return _Worker(*self._server.fork())
            except (FatalError, OSError, ValueError) as error:  # the files may be others by now
                why = f"the process of {self.WORKS} cannot be started, try again: {error}"
                raise ApiError(503, why, retry_after=1) from None

    def _end(self, worker: _Worker) -> int | None:
        """Its exit code; None where the process that forked it has ended, which ends it, or could not fork it."""
        worker.messages.socket.close()
        with self._lock:
            try:
                self._server.end(worker.number)
                answer = self._server.answer()
            except OSError:  # it has ended, or does not answer
                self._stop()
                return None
        return answer[0] if answer is not None else None

    def _start(self) -> None:
        self._stop()
        control = self._server.start()
        control.settimeout(self.limits.loading_seconds * PATIENCE)
        answer, late = None, False
        try:
            answer = self._server.answer()
        except TimeoutError:
            late = True
        if answer is not None and not answer[1]:
            control.settimeout(WAIT)
            return
        ended = self._server.stop(1.0)
        if answer is not None:
            code, why = answer
            raise FatalError(why, code) if code else ValueError(why)
        most = f"{self.limits.loading_seconds:g} s"
        if not late and ended != -signal.SIGPROF:
            most = f"{self.limits.loading_memory >> 20} MiB of memory, or fails (exit code {ended})"
        raise ValueError(f"starting {self.WORKS} takes more than {most}")

    def _stop(self) -> None:
        while self._idle:
            self._idle.pop().messages.socket.close()
        self._server.stop()


@functools.cache
def _decoder(function: Callable[..., Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(get_type_hints(function)["return"])


class RemoteTokenizer(TokenTable):
    """A tokenizer whose table is here. Encoding is done by a worker, and so are texts of many tokens."""

    def __init__(self, facts: TextFacts, process: TextProcess):
        self.added = facts.added
        self.special = frozenset(facts.special)
        self.size = facts.size
        self.end = facts.end
        self.bytewise = facts.bytewise
        self._pieces = facts.pieces
        self._process = process
        # For each token of an answer its neighbours are decoded: too often to ask.
        self._local = None if facts.bytewise else tokenizers.Tokenizer.from_str(facts.decoding_part)

    def piece(self, id: int) -> bytes:
        return self._pieces[id] if id < len(self._pieces) else b""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self._local is not None:
            return self._local.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._process.run(decode, ids, skip_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._process.run(encode, text, add_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._process.run(token_id, token)


class RemoteText(ModelText):
    """A model's text files, read and run in a process of their own."""

    def __init__(self, settings: TextSettings, limits: Limits = LIMITS):
        """Raises ValueError where they cannot be read, or not within the limits."""
        super().__init__()
        self._settings, self._limits = settings, limits
        self._cuts: dict[int, RemoteText] = {}  # by their number of tokens
        self._lock = threading.Lock()  # of these
        self.process = TextProcess(settings, limits)
        try:
            facts = self.run(text_facts)
        except ApiError as error:
            self.close()
            raise ValueError(error.message) from None
        self.tokenizer: RemoteTokenizer = RemoteTokenizer(facts, self.process)
        self.generation = json.loads(facts.generation)
        self.end_tokens = facts.end_tokens
        self.pooling = facts.pooling
        self.tool_format = tool_formats.find(facts.tool_format) if facts.tool_format else None
        self.reasoning = reasoning.find(facts.reasoning) if facts.reasoning else None
        self.chats, self.takes_tools, self.family = facts.chats, facts.takes_tools, facts.family

    def run(self, function: Callable[Concatenate[Text, P], R], *args: P.args, **options: P.kwargs) -> R:
        return self.process.run(function, *args, **options)

    def within(self, vocab_size: int) -> RemoteText:
        if self.tokenizer.end <= vocab_size:
            return self
        with self._lock:
            if vocab_size not in self._cuts:
                self._cuts[vocab_size] = RemoteText(self._settings._replace(vocab_size=vocab_size), self._limits)
            return self._cuts[vocab_size]

    def close(self) -> None:
        for one in (self, *self._cuts.values()):
            one.process.close()
