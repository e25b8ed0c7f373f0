"""Grammars of constrained sequences: compiled in threads, then asked before each step which tokens may come.

llguidance does both (https://github.com/guidance-ai/llguidance). It is imported when the first grammar comes.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..protocol import Request, SamplingParams, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

KEPT = 256  # compiled grammars
MOST_THREADS = 8  # that compute masks
COMPILERS = 4  # threads; a large schema's grammar takes long, and others would wait for it
LONGEST = 60.0  # seconds from a request to its compiled grammar, the waiting for others included


class Grammar:
    """One sequence's: the tokens that its output may go on with."""

    __slots__ = ("_compiled", "_matcher", "error", "over")

    def __init__(self, compiled: Compiled, matcher: LLMatcher):
        self._compiled = compiled
        self._matcher = matcher
        self.over = ""  # why no token may follow: "stop", the text is complete, or "error"
        self.error = ""

    def accept(self, token: int) -> str:
        """Take over a token that was sampled; returns `over`."""
        if not self.over:
            self._matcher.consume_token(token)
            self._look()
            if not self.over and self._matcher.is_stopped():
                self.over = "stop"
        return self.over

    def _look(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().strip().splitlines()[0]
            self.over, self.error = "error", f"the output's grammar cannot be followed further: {why}"

    def _close(self, bits: np.ndarray, sampling: SamplingParams, outputs: int) -> None:
        """Finish a mask, [words]: tokens that end the sequence are allowed where the grammar accepts."""
        self._look()
        ends = bool(not self.over and self._matcher.is_accepting() and outputs >= sampling.min_tokens)
        for token in self._compiled.ends:
            _set(bits, token, False)  # unless the sequence ends with it
        for token in sampling.stop_token_ids:
            _set(bits, token, ends)
        if not self.over and not bits.any():  # complete, and it may not end by a token
            self.over = "stop"
        if self.over:
            bits[:] = -1  # whatever is sampled is dropped


def _set(bits: np.ndarray, token: int, on: bool) -> None:
    word, bit = divmod(token, 32)
    if word < len(bits):
        octets = bits.view(np.uint32)
        octets[word] = octets[word] | np.uint32(1 << bit) if on else octets[word] & ~np.uint32(1 << bit)


class Constrained(Protocol):
    """A sequence with a grammar."""

    grammar: Grammar | None
    sampling: SamplingParams
    tokens: list[int]
    prompt_len: int
    finished: bool


def masks(sequences: Sequence[Constrained]) -> bytes:
    """The tokens that may follow each sequence's: a bit for each token, in words of 32, one sequence after the other.

    All sequences have a grammar. All tokens of those that have not finished are known.
    """
    grammars = [one.grammar for one in sequences if one.grammar is not None]
    compiled = grammars[0]._compiled
    bits = np.full((len(grammars), compiled.words), -1, np.int32)
    live = [
        i
        for i, (one, grammar) in enumerate(zip(sequences, grammars, strict=True))
        if not (one.finished or grammar.over)
    ]
    wanted = [(grammars[i]._matcher, i) for i in live]
    if wanted:
        compiled.executor.unsafe_compute_mask_ptr(wanted, bits.ctypes.data, compiled.words * 4, len(bits))
    for i in live:
        one = sequences[i]
        grammars[i]._close(bits[i], one.sampling, len(one.tokens) - one.prompt_len)
    return bits.tobytes()


class Compiled:
    """What all grammars of a model share."""

    def __init__(self, vocabulary: Vocabulary):
        import llguidance

        self.ends = vocabulary.ends
        self.words = -(-vocabulary.size // 32)
        self.tokenizer: LLTokenizer = llguidance.LLTokenizer(
            vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=list(vocabulary.ends) or None
        )
        self.executor: LLExecutor = llguidance.LLExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))))
        self._lock = threading.Lock()
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()  # by grammar, least recently used first

    def grammar(self, text: str) -> Grammar:
        """Raises ValueError where the text is no grammar, or one that is too large."""
        from llguidance import LLMatcher

        with self._lock:
            matcher = self._matchers.pop(text, None)
        if matcher is None:
            matcher = LLMatcher(self.tokenizer, text, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error().strip())
        grammar = Grammar(self, matcher.deep_copy())
        with self._lock:
            self._matchers[text] = matcher
            while len(self._matchers) > KEPT:
                self._matchers.popitem(last=False)
        return grammar


class _Shared:
    """A vocabulary's `Compiled`, which the first grammar makes."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary: Vocabulary | None = vocabulary
        self._lock = threading.Lock()
        self._made: Compiled | Exception

    def get(self) -> Compiled:
        with self._lock:
            if self._vocabulary is not None:
                try:
                    self._made = Compiled(self._vocabulary)
                except Exception as error:
                    self._made = error
                self._vocabulary = None
        if isinstance(self._made, Exception):
            raise self._made
        return self._made


class Grammars:
    """Compiles the grammars of requests in a few threads, so that no step waits for it, and seldom one for another.

    What takes too long is given up: its request ends with an error, though its thread is busy until it is done.
    """

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[Request, _Shared | None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Request, Grammar | str]] = queue.SimpleQueue()
        # By their ids, when they have to be done: requests that are being compiled and were not aborted; in order.
        self._open: dict[str, tuple[float, Request]] = {}
        self._threads: list[threading.Thread] = []
        self._shared: _Shared | None = None

    @property
    def pending(self) -> bool:
        return bool(self._open)

    def know(self, vocabulary: Vocabulary) -> None:
        """Requests that come from now on are for this vocabulary."""
        self._shared = _Shared(vocabulary)

    def compile(self, request: Request) -> None:
        self._open[request.id] = time.monotonic() + LONGEST, request
        self._todo.put((request, self._shared))
        if len(self._threads) < min(COMPILERS, len(self._open)):
            self._threads.append(threading.Thread(target=self._work, name="grammars", daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """End the threads, and with them what is kept of the model; what was to be compiled is given up."""
        self._shared = None
        self._open.clear()
        for _ in self._threads:
            self._todo.put(None)

    def abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._open.pop(id, None)

    def take(self) -> list[tuple[Request, Grammar | str]]:
        """The requests that are compiled, with their grammars, or with why there is none."""
        found: list[tuple[Request, Grammar | str]] = []
        while not self._done.empty():
            request, grammar = self._done.get()
            if self._open.pop(request.id, None) is not None:
                found.append((request, grammar))
        now = time.monotonic()
        while self._open and (first := next(iter(self._open.values())))[0] < now:
            why = f"it was not compiled within {LONGEST:g} s, make the schema or the grammar simpler"
            found.append((first[1], f"the output cannot be constrained: {why}"))
            del self._open[first[1].id]
        return found

    def _work(self) -> None:
        while (one := self._todo.get()) is not None:
            self._compile(*one)
            del one  # it keeps a model's vocabulary

    def _compile(self, request: Request, shared: _Shared | None) -> None:
        if request.id not in self._open:  # aborted, or given up
            return
        try:
            if shared is None:
                raise ValueError("the vocabulary is not known")
            self._done.put((request, shared.get().grammar(request.grammar)))
        except Exception as error:
            self._done.put((request, f"the output cannot be constrained: {error}"))
