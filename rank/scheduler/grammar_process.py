"""Processes that compile grammars and compute masks: untrusted work, which may cost its process and nothing else.

The first process reads the tokenizer once and forks workers (fork_server.py), each with a socket and a memory file. A
worker writes masks into the memory file, one slot a sequence, and reports the finished ones over the socket. llguidance
does the work (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import psutil

from ... import linux_calls
from .. import fork_server, protocol
from ..framed_socket import FramedSocket
from ..protocol import MAX_DRAFTS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SLOTS = 1024  # sequences of a worker
HEAD = mmap.PAGESIZE  # bytes before the first slot: a Progress
MAX_THREADS = 8  # that compute masks, one of them the main thread
CACHE_BYTES = 128 << 20  # resident memory above which a worker drops grammars that no sequence uses
MAX_BYTES = 1 << 30  # of memory of its own that a worker may have
KEPT_FORCED = 1024  # tokens of a text that has to follow
COMPILE_NICE = 10  # compiling waits for masks, and for the ranks


class State(msgspec.Struct, array_like=True, tag=0):
    """A sequence is compiled, or has taken tokens; its mask is in its slot unless it is over."""

    slot: int
    count: int  # output tokens that it has taken
    over: str = ""  # why no token may follow: "stop", the text is complete, or "error"
    error: str = ""
    forced: list[int] = []  # tokens of the text that has to follow, as far as there is no choice


class Freed(msgspec.Struct, array_like=True, tag=1):
    """Nothing writes to this slot any more."""

    slot: int


class Start(msgspec.Struct, array_like=True, tag=0):
    """Compile a grammar for a sequence with these output tokens."""

    slot: int
    grammar: str
    stops: tuple[int, ...]  # tokens that end the sequence
    min_tokens: int
    tokens: list[int]


class Accept(msgspec.Struct, array_like=True, tag=1):
    """Tokens were sampled: slots, each with its sequence's new tokens."""

    tokens: list[tuple[int, list[int]]]


class Draft(msgspec.Struct, array_like=True, tag=3):
    """Tokens that may be sampled: slots, each with those of its sequence. State answers, as to Accept, once the masks
    of what may follow each of them are there."""

    tokens: list[tuple[int, list[int]]]


class Forget(msgspec.Struct, array_like=True, tag=2):
    """A sequence has ended. Freed answers it."""

    slot: int


ToRank = State | Freed
ToWorker = Start | Accept | Draft | Forget


def mask_words(vocabulary: protocol.Vocabulary) -> int:
    """32-bit words of a mask, which has a bit for each token."""
    return -(-vocabulary.size // 32)


def memory_size(words: int) -> int:
    """Bytes of a worker's memory file. Its pages take memory when they are first written."""
    return HEAD + SLOTS * (1 + MAX_DRAFTS) * words * 4


def masks_in(memory: mmap.mmap, words: int) -> np.ndarray:
    """The masks in a worker's memory file, [SLOTS, 1 + MAX_DRAFTS, words] int32: the next one, and those behind each
    draft."""
    masks = np.frombuffer(memory, np.int32, SLOTS * (1 + MAX_DRAFTS) * words, HEAD)
    return masks.reshape(SLOTS, 1 + MAX_DRAFTS, words)


class Progress:
    """The work of each of a worker's threads; rank 0 reads it from the memory file."""

    def __init__(self, memory: mmap.mmap):
        table = np.frombuffer(memory, np.int64, 2 * (MAX_THREADS + 2)).reshape(-1, 2)
        self._process, self._at = table[0], table[1:]

    @property
    def pid(self) -> int:
        """The worker's; 0 where it has not started yet."""
        return int(self._process[0])

    def start(self) -> None:
        """Say that this process is the worker."""
        self._process[0] = os.getpid()

    def begin(self, thread: int, slot: int) -> None:
        """thread: 0 compiles, the others compute masks."""
        self._at[thread] = time.monotonic_ns(), slot + 1

    def end(self, thread: int) -> None:
        self._at[thread, 1] = 0

    def work(self) -> list[tuple[bool, int, float]]:
        """For each thread at work: whether it compiles, for which slot, and since when by time.monotonic()."""
        return [(i == 0, int(slot) - 1, float(at) / 1e9) for i, (at, slot) in enumerate(self._at) if slot]


class Matcher:
    """A sequence's place in its grammar."""

    def __init__(self, matcher: LLMatcher, ends: tuple[int, ...], stops: tuple[int, ...], min_tokens: int):
        """ends: the vocabulary's end tokens. stops: those that end this sequence."""
        self._matcher = matcher
        self._ends, self._stops, self._min_tokens = ends, stops, min_tokens
        self.count = 0  # tokens taken
        self.over = self.error = ""  # as State has them
        self._forced: list[int] = []  # the rest of the text that had to follow; long ones are not computed twice
        self._look()

    def take(self, tokens: list[int]) -> None:
        for token in tokens:
            if self.over:
                return
            self.count += 1
            self._forced = self._forced[1:] if self._forced[:1] == [token] else []
            self._matcher.consume_token(token)
            self._look()
            if not self.over and self._matcher.is_stopped():
                self.over = "stop"

    def mask(self, bits: np.ndarray) -> None:
        """Write which tokens may follow into `bits`, [words] int32. No bit means anything where it is over then.

        Tokens that end the sequence are allowed where the grammar accepts, other end tokens never.
        """
        if self.over:
            return
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._look()
        ends = bool(not self.over and self._matcher.is_accepting() and self.count >= self._min_tokens)
        for token in self._ends:
            _set(bits, token, False)
        for token in self._stops:
            _set(bits, token, ends)
        if not self.over and not bits.any():  # complete, and it may not end by a token
            self.over = "stop"

    def forced(self) -> list[int]:
        """Tokens of the text that has to follow; other tokens may make the same text. Empty where it is over then."""
        if self.over:
            return []
        if not self._forced:
            self._forced = self._matcher.compute_ff_tokens()[:KEPT_FORCED]
            self._look()
        return self._forced[: MAX_DRAFTS + 1]

    def masks_behind(self, drafts: list[int], bits: np.ndarray) -> None:
        """Write the masks behind each of these drafts into bits[1:], [drafts, words], where bits[0] is the next one.

        Behind one that is not allowed, or is a stop token, all are allowed: nothing is sampled there. Behind one that
        completes the text only end tokens are: the scheduler may not know yet that the text is complete, and show what
        is sampled there.
        """
        bits[1 : 1 + len(drafts)] = -1
        ahead = Matcher(self._matcher.deep_copy(), self._ends, self._stops, self._min_tokens)
        ahead.count = self.count
        for i, token in enumerate(drafts):
            if token in self._stops or not bits[i, token // 32] >> (token % 32) & 1:
                return
            ahead.take([token])
            ahead.mask(bits[i + 1])
            if ahead.over:
                ends = self._stops or self._ends if ahead.over == "stop" else ()
                for row in bits[i + 1 : 1 + len(drafts)]:
                    row[:] = 0 if ends else -1
                    for end in ends:
                        _set(row, end, True)
                return

    def _look(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().strip().splitlines()[0]
            if "NoExtensionBias" in why:  # llguidance's word
                why = "nothing can be written that its schema or grammar allows; see whether it refers to itself"
            self.over, self.error = "error", f"the output's grammar cannot be followed further: {why}"


def _set(bits: np.ndarray, token: int, on: bool) -> None:
    word, bit = divmod(token, 32)
    if word < len(bits):
        octets = bits.view(np.uint32)
        octets[word] = octets[word] | np.uint32(1 << bit) if on else octets[word] & ~np.uint32(1 << bit)


class Compiler:
    """Compiles grammars for one vocabulary and keeps them, as long as the process's memory is below a limit."""

    def __init__(self, tokenizer: LLTokenizer, ends: tuple[int, ...], cache_bytes: int = CACHE_BYTES):
        self._tokenizer = tokenizer
        self._ends = ends
        self._most = _resident() + cache_bytes
        self.kept: OrderedDict[str, LLMatcher] = OrderedDict()  # by grammar, least recently used first

    def matcher(self, grammar: str, stops: tuple[int, ...], min_tokens: int) -> Matcher:
        """Raises ValueError where the text is no grammar, or one that is too large. Failed ones are not kept."""
        from llguidance import LLMatcher

        compiled = self.kept.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0)
            if compiled.is_error():
                raise ValueError(compiled.get_error().strip())
        self.kept[grammar] = compiled
        return Matcher(compiled.deep_copy(), self._ends, stops, min_tokens)

    def trim(self) -> None:
        """Drop kept grammars while the process has too much memory. Of what sequences use, nothing is freed by that."""
        while self.kept and _resident() > self._most:
            self.kept.popitem(last=False)
            gc.collect(0)
            ctypes.CDLL(None).malloc_trim(0)


def _resident() -> int:
    return psutil.Process().memory_info().rss


class Worker:
    """The forked process. The main thread receives; it and others compute masks, and one more compiles.

    A sequence's masks are always computed by the same thread, so what comes for it is done in order.
    """

    def __init__(self, sock: socket.socket, memory: mmap.mmap, tokenizer: LLTokenizer, vocabulary: protocol.Vocabulary):
        self._rank = FramedSocket(sock, ToWorker)
        self._progress = Progress(memory)
        self._bits = masks_in(memory, mask_words(vocabulary))
        self._compiler = Compiler(tokenizer, vocabulary.ends)
        self._matchers: dict[int, Matcher] = {}  # by slot
        self._starts: queue.SimpleQueue[Start | Forget] = queue.SimpleQueue()
        threading.Thread(target=self._compile, name="compile", daemon=True).start()
        others = min(MAX_THREADS, len(linux_calls.processors())) - 1
        self._queues = [queue.SimpleQueue[Accept | Draft | int]() for _ in range(others)]
        for i, todo in enumerate(self._queues):
            threading.Thread(target=self._masks, args=(i + 2, todo), name=f"masks {i}", daemon=True).start()

    def run(self) -> None:
        """Until rank 0 closes the socket."""
        self._progress.start()
        while (messages := self._rank.receive()) is not None:
            for message in messages:
                if isinstance(message, Start) or message.__class__ is Forget and message.slot not in self._matchers:
                    self._starts.put(message)
                elif isinstance(message, Forget):
                    self._forget(message.slot)
                else:
                    self._share_out(message)

    def _thread_of(self, slot: int) -> int:
        """0 is the main thread."""
        return slot % (len(self._queues) + 1)

    def _forget(self, slot: int) -> None:
        if thread := self._thread_of(slot):
            self._queues[thread - 1].put(slot)
        else:
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        self._matchers.pop(slot, None)
        self._rank.send(Freed(slot))

    def _share_out(self, message: Accept | Draft) -> None:
        shares: list[list[tuple[int, list[int]]]] = [[] for _ in range(len(self._queues) + 1)]
        for one in message.tokens:
            shares[self._thread_of(one[0])].append(one)
        for todo, share in zip(self._queues, shares[1:], strict=True):
            if share:
                todo.put(type(message)(share))
        if shares[0]:
            self._take(1, type(message)(shares[0]))

    def _masks(self, thread: int, todo: queue.SimpleQueue[Accept | Draft | int]) -> None:
        while True:
            work = todo.get()
            if isinstance(work, int):
                self._drop(work)
            else:
                self._take(thread, work)

    def _take(self, thread: int, work: Accept | Draft) -> None:
        done: list[State] = []
        for slot, tokens in work.tokens:
            matcher = self._matchers[slot]
            self._progress.begin(thread, slot)
            if isinstance(work, Draft):
                matcher.masks_behind(tokens, self._bits[slot])
            else:
                matcher.take(tokens)
                matcher.mask(self._bits[slot, 0])
            forced = matcher.forced()
            self._progress.end(thread)
            done.append(State(slot, matcher.count, matcher.over, matcher.error, forced))
        self._rank.send(*done)

    def _compile(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICE)
        while True:
            message = self._starts.get()
            if isinstance(message, Forget):
                self._drop(message.slot)
                continue
            self._progress.begin(0, message.slot)
            try:
                matcher = self._compiler.matcher(message.grammar, message.stops, message.min_tokens)
            except Exception as error:
                state = State(message.slot, 0, "error", f"the output cannot be constrained: {error}")
            else:
                matcher.take(message.tokens)
                matcher.mask(self._bits[message.slot, 0])
                self._matchers[message.slot] = matcher
                forced = matcher.forced()
                state = State(message.slot, matcher.count, matcher.over, matcher.error, forced)
            self._progress.end(0)
            self._rank.send(state)
            self._compiler.trim()


def work(tokenizer: LLTokenizer, vocabulary: protocol.Vocabulary, sock: socket.socket, files: Sequence[int]) -> None:
    """Be a worker. files: the memory file alone."""
    fork_server.limit_memory(MAX_BYTES)  # llguidance aborts where an allocation fails
    memory = mmap.mmap(files[0], memory_size(mask_words(vocabulary)))
    os.close(files[0])
    Worker(sock, memory, tokenizer, vocabulary).run()


def load(data: bytes) -> fork_server.Work:
    vocabulary = msgspec.msgpack.decode(data, type=protocol.Vocabulary)
    import llguidance

    tokenizer = llguidance.LLTokenizer(
        vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=list(vocabulary.ends) or None
    )
    return functools.partial(work, tokenizer, vocabulary)


if __name__ == "__main__":
    fork_server.serve(load)
