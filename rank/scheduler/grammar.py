"""Grammars of constrained sequences: compiled in a thread, then asked before each step which tokens may come.

llguidance does both (https://github.com/guidance-ai/llguidance). It is imported when the first grammar comes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..protocol import Request, SamplingParams, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

KEPT = 256  # compiled grammars
MOST_THREADS = 8  # that compute masks


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
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()  # by grammar, least recently used first

    def grammar(self, text: str) -> Grammar:
        """Raises ValueError where the text is no grammar, or one that is too large."""
        from llguidance import LLMatcher

        matcher = self._matchers.pop(text, None)
        if matcher is None:
            matcher = LLMatcher(self.tokenizer, text, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error().strip())
        self._matchers[text] = matcher
        while len(self._matchers) > KEPT:
            self._matchers.popitem(last=False)
        return Grammar(self, matcher.deep_copy())


class Grammars:
    """Compiles the grammars of requests in a thread of its own, in order, so that no step waits for it."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Vocabulary | Request | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Request, Grammar | str]] = queue.SimpleQueue()
        self._open: set[str] = set()  # ids of requests that are being compiled and were not aborted
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        return bool(self._open)

    def know(self, vocabulary: Vocabulary) -> None:
        """Requests that come from now on are for this vocabulary."""
        self._todo.put(vocabulary)

    def compile(self, request: Request) -> None:
        self._open.add(request.id)
        self._todo.put(request)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, and with it what is kept of the model."""
        self._todo.put(None)

    def abort(self, ids: Iterable[str]) -> None:
        self._open.difference_update(ids)

    def take(self) -> list[tuple[Request, Grammar | str]]:
        """The requests that are compiled, with their grammars, or with why there is none."""
        found = []
        while not self._done.empty():
            request, grammar = self._done.get()
            if request.id in self._open:
                self._open.remove(request.id)
                found.append((request, grammar))
        return found

    def _work(self) -> None:
        compiled: Any = None
        while (one := self._todo.get()) is not None:
            try:
                if isinstance(one, Vocabulary):
                    compiled = Compiled(one)
                elif compiled is None:
                    self._done.put((one, "the output cannot be constrained: the vocabulary is not known"))
                elif isinstance(compiled, str):
                    self._done.put((one, compiled))
                else:
                    self._done.put((one, compiled.grammar(one.grammar)))
            except Exception as error:
                why = f"the output cannot be constrained: {error}"
                if isinstance(one, Vocabulary):
                    compiled = why
                else:
                    self._done.put((one, why))
