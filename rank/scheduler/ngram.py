"""Drafts without a model: what followed the same tokens before, in the sequence or in earlier answers.

A sequence is compared with what it repeats token by token, and only where that ends are its last tokens looked up: so a
token takes about a microsecond, however long the sequence is.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

import numpy as np

from .sequence import Sequence

N = 3  # tokens that have to be equal
FACTORS = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # odd: of a hash of N tokens, the highest bits of a sum of products
MANY = 64  # new tokens that numpy enters faster than Python does
LONGEST_RUN = 32  # tokens that are compared backwards, to tell how far a sequence repeats something
END = -1  # behind an answer; equals no token
KEPT = 1 << 16  # tokens of earlier answers that are kept of a cache salt ...
MAX_SALTS = 16  # ... of so many of these

Run = tuple[list[int], int, int]  # tokens that are repeated, where they go on, and how many were equal; 0: none


class Index:
    """The last places of each N tokens of a growing list. It forgets: entries with the same hash replace each
    other, and what is found is compared."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        self.entered = 0  # leading tokens whose runs of N are in the table
        self._table = array("i")  # the place behind N tokens; 0: none
        self._shift = 32

    def catch_up(self, until: int) -> None:
        """Enter the runs that end within tokens[:until]."""
        if 2 * until > len(self._table):
            bits = max(8, (4 * until - 1).bit_length())
            self._table, self._shift, self.entered = array("i", bytes(4 << bits)), 32 - bits, 0
        first = max(self.entered, N - 1)
        if until - first > MANY:
            tokens = np.array(self.tokens[first - N + 1 : until]).astype(np.uint64)  # also END
            hashes = sum(tokens[i : len(tokens) - N + 1 + i] * np.uint64(FACTORS[i]) for i in range(N))
            places = (hashes & np.uint64(0xFFFFFFFF)) >> np.uint64(self._shift)
            np.frombuffer(self._table, np.int32)[places] = np.arange(first + 1, until + 1)
        else:
            for end in range(first + 1, until + 1):
                self._table[self._place(self.tokens, end)] = end
        self.entered = max(self.entered, until)

    def _place(self, tokens: list[int], end: int) -> int:
        a, b, c = tokens[end - N : end]
        return (a * FACTORS[0] + b * FACTORS[1] + c * FACTORS[2] & 0xFFFFFFFF) >> self._shift

    def find(self, tokens: list[int]) -> Run | None:
        """The last place where the newest tokens of a list stand here, of those that are entered."""
        if len(tokens) < N or not self._table:
            return None
        at = self._table[self._place(tokens, len(tokens))]
        if not at or self.tokens[at - N : at] != tokens[-N:]:
            return None
        equal, most = N, min(LONGEST_RUN, at, len(tokens))
        while equal < most and self.tokens[at - equal - 1] == tokens[-equal - 1]:
            equal += 1
        return self.tokens, at, equal


class Answers:
    """Earlier answers of this replica by cache salt, bounded: of others' sequences nothing is found."""

    def __init__(self) -> None:
        self._by_salt: OrderedDict[str, Index] = OrderedDict()

    def add(self, salt: str, answer: list[int]) -> None:
        index = self._by_salt.pop(salt, None) or Index([])
        if len(index.tokens) + len(answer) > KEPT:  # sequences that repeat the old list keep it
            index = Index(index.tokens[-KEPT // 2 :])
        index.tokens += answer[-KEPT // 2 :]
        index.tokens.append(END)
        self._by_salt[salt] = index
        while len(self._by_salt) > MAX_SALTS:
            self._by_salt.popitem(last=False)

    def find(self, salt: str, tokens: list[int]) -> Run | None:
        index = self._by_salt.get(salt)
        if index is None:
            return None
        if index.entered < len(index.tokens):
            index.catch_up(len(index.tokens))
        return index.find(tokens)


class Ngrams:
    """A sequence's drafts. `Speculation` calls `follow` before `draft`, as tokens have come since."""

    def __init__(self, sequence: Sequence, answers: Answers, prediction: list[int]):
        """prediction: what the client thinks that the answer will be."""
        self._sequence, self._answers = sequence, answers
        # A prediction counts as text before the prompt.
        self._before = len(prediction)
        self._tokens = [*prediction, *sequence.tokens] if prediction else sequence.tokens
        self._index = Index(self._tokens)
        self._seen = 0  # tokens of the sequence that are taken into account
        self._run: Run | None = None
        self._predicts = bool(prediction)

    @property
    def source(self) -> str:
        """The metric's name of what is repeated now."""
        assert self._run is not None
        tokens, at, _ = self._run
        if tokens is not self._tokens:
            return "answers"
        return "prediction" if at < self._before else "ngram"

    @property
    def run(self) -> int:
        """Equal tokens up to here; 0: nothing is repeated."""
        return self._run[2] if self._run is not None else 0

    def follow(self) -> list[tuple[int, bool]]:
        """Take new tokens into account. Returns for each that something was repeated before: the run's length, and
        whether it went on."""
        tokens, total = self._sequence.tokens, len(self._sequence.tokens)
        new = tokens[self._seen :]
        if self._before and self._seen:
            self._tokens += new
        history: list[tuple[int, bool]] = []
        if not self._seen:
            if self._predicts and total == self._sequence.prompt_len:
                self._run = self._tokens, 0, N
        elif total - self._seen > MANY:
            self._run = None
        else:
            for token in new:
                if self._run is None:
                    continue
                of, at, length = self._run
                went_on = at < len(of) and of[at] == token
                history.append((length, went_on))
                self._run = (of, at + 1, length + 1) if went_on else None
        self._seen = total
        length = len(self._tokens)
        self._index.catch_up(length - 1)
        if self._run is None:
            self._run = self._index.find(self._tokens) or self._answers.find(self._sequence.salt, tokens)
        return history

    def draft(self, most: int) -> list[int]:
        """Up to so many tokens that probably follow."""
        if self._run is None:
            return []
        tokens, at, _ = self._run
        found = tokens[at : at + most]
        if tokens is not self._tokens:
            return found[: found.index(END)] if END in found else found
        if found and at >= self._before:  # what is repeated may reach what is drafted
            period = len(tokens) - at
            while len(found) < most:
                found.append(found[-period])
        return found
