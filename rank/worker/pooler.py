"""Pools a sequence's hidden states into one vector: the embeddings endpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import protocol
from ..model.base import Model
from .state import ScheduledBatch


class Pooler:
    """Keeps the rows whose sequences want an embedding. It pools hidden states after the final norm."""

    def __init__(self, model: Model):
        self._model = model
        self._ways: dict[int, str] = {}  # row → protocol.SamplingParams.pooling
        self._sums: dict[int, Tensor] = {}  # row → [hidden] f32, the sum of hidden states; of "cls" the first one

    def enter(self, new: protocol.NewSequence) -> None:
        self.leave(new.row)
        if new.sampling.pooling:
            self._ways[new.row] = new.sampling.pooling
            self._sums[new.row] = torch.zeros(self._model.hidden_size, device=self._model.rope.device)

    def leave(self, row: int) -> None:
        self._ways.pop(row, None)
        self._sums.pop(row, None)

    @property
    def empty(self) -> bool:
        return not self._ways

    def pool(self, hidden: Tensor, scheduled: ScheduledBatch) -> dict[int, Tensor]:
        """Add a step's hidden states [T, hidden]. Returns the vectors [hidden] f32 of the sequences that it completes,
        by their index among the sampled rows."""
        found = {}
        for row, start, count, first, sampled in scheduled.spans():
            if row not in self._ways:
                continue
            way, states = self._ways[row], hidden[first : first + count]
            if way == "mean":
                self._sums[row] += self._model.normed(states).float().sum(0)
            elif way == "cls" and start == 0:
                self._sums[row] = self._model.normed(states[:1])[0].float()
            if sampled >= 0:
                last, length = self._model.normed(states[-1:])[0].float(), start + count
                found[sampled] = last if way == "last" else self._sums[row] / (length if way == "mean" else 1)
        return found
