"""Pools a sequence's hidden states into one vector: the embeddings endpoint."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import protocol
from ..model.base import Model
from .state import ScheduledBatch


class Pooler:
    """Keeps the rows whose sequences want an embedding. It pools hidden states after the final norm."""

    def __init__(self, model: Model):
        self._model = model
        self._sums: dict[int, Tensor | None] = {}  # row → sum of hidden states [hidden] f32; None: last token

    def enter(self, new: protocol.NewSequence) -> None:
        self.leave(new.row)
        if new.sampling.pooling:
            mean = new.sampling.pooling == "mean"
            device, width = self._model.rope.device, self._model.hidden_size
            self._sums[new.row] = torch.zeros(width, device=device) if mean else None

    def leave(self, row: int) -> None:
        self._sums.pop(row, None)

    @property
    def empty(self) -> bool:
        return not self._sums

    def pool(self, hidden: Tensor, scheduled: ScheduledBatch) -> dict[int, Tensor]:
        """Add a step's hidden states [T, hidden]. Returns the vectors [hidden] f32 of the sequences that it completes,
        by their index among the sampled rows."""
        found = {}
        ends = np.cumsum(scheduled.counts)
        places = np.cumsum(scheduled.samples) - 1
        for i in range(len(scheduled.rows)):
            row, stop = int(scheduled.rows[i]), int(ends[i])
            if row not in self._sums:
                continue
            total = self._sums[row]
            if total is not None:
                total += self._model.normed(hidden[stop - int(scheduled.counts[i]) : stop]).float().sum(0)
            if scheduled.samples[i]:
                last = self._model.normed(hidden[stop - 1 : stop])[0].float()
                length = int(scheduled.starts[i] + scheduled.counts[i])
                found[int(places[i])] = last if total is None else total / length
        return found
