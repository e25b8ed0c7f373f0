"""Drafts of which a wanted part is right, whatever the weights: for the speed of speculation with random ones.

A draft's lowest bit says whether it counts as right. Ranks take right ones for what they have sampled, and wrong ones
for something else: as other engines do that measure so.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from ..rank.scheduler.sequence import Sequence
from ..rank.scheduler.speculation import Speculation
from ..rank.worker.model_runner import ModelRunner
from ..rank.worker.state import ScheduledBatch


def parsed(text: str) -> tuple[float, int]:
    """L and K of `L/K`: tokens that a step with K drafts is to give on average. Raises ValueError."""
    length, _, drafts = text.partition("/")
    wanted, most = float(length), int(drafts)
    if not (1 <= most <= 7 and 1 <= wanted <= most + 1):
        raise ValueError(f"--accept {text}: K drafts, 1 to 7, give 1 to K + 1 tokens a step")
    return wanted, most


def chance(wanted: float, drafts: int) -> float:
    """The chance of each draft, behind right ones, with which a step gives so many tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafts + 1)) < wanted else (low, middle)
    return high


class Wanted(Speculation):
    """Speculation that always has K drafts verified. A model that drafts runs, but others stand for its drafts."""

    def __init__(self, wanted: float, drafts: int, vocab_size: int, *given: Any):
        super().__init__(*given)
        self._chance, self._count, self._vocab = chance(wanted, drafts), drafts, vocab_size
        self._random = random.Random(0)

    def choose(self, sequences: list[Sequence]) -> tuple[int, dict[str, list[int]]]:
        self.model_drafts = self._count if self._model else 0
        for one in sequences:
            drafter = self._drafters.get(one.id) or self._new(one)
            drafter.source = self._model or "ngram"
        return (1 + self._count if sequences else 1), {one.id: self._drafts() for one in sequences}

    def _drafts(self) -> list[int]:
        drawn = self._random
        return [2 * drawn.randrange(self._vocab // 2) + (drawn.random() >= self._chance) for _ in range(self._count)]


def force(runner: ModelRunner) -> None:
    """Have a rank sample as its drafts say."""
    keep = runner._keep

    def forced(rows: Tensor, ids: Tensor, scheduled: ScheduledBatch) -> Tensor | None:
        if scheduled.drafts is not None and len(scheduled.drafts):
            (drafts,) = runner._upload.send([scheduled.drafts])
            count, query_len = len(drafts), scheduled.query_len
            sampled = ids[: count * query_len].view(count, query_len)[:, :-1]
            sampled.copy_(torch.where(drafts < 0, sampled, drafts ^ (drafts & 1)))
        return keep(rows, ids, scheduled)

    runner._keep = forced  # type: ignore[method-assign]
