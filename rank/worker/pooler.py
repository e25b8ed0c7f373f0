"""Embeddings: what the last layer makes of a sequence's tokens, as one vector."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import protocol
from ..model.base import Model
from .state import ScheduledBatch


class Pooler:
    """The rows whose sequences are to become vectors; of hidden states as the head would read them."""

    def __init__(self, model: Model):
        self._model = model
        self._sums: dict[int, Tensor | None] = {}  # row → sum over its tokens [hidden] f32; None: its last token counts

    def enter(self, new: protocol.NewSequence) -> None:
        self.leave(new.row)
        if new.sampling.pooling:
            mean = new.sampling.pooling == "mean"
            device, width = self._model.rope.table.device, self._model.hidden_size
            self._sums[new.row] = torch.zeros(width, device=device) if mean else None

    def leave(self, row: int) -> None:
        self._sums.pop(row, None)

    @property
    def empty(self) -> bool:
        return not self._sums

    def take(self, hidden: Tensor, work: ScheduledBatch) -> dict[int, Tensor]:
        """hidden [T, hidden] of a step's tokens. The vectors [hidden] f32 of sequences that end with it, by their place
        among those that sample."""
        found = {}
        ends = np.cumsum(work.counts)
        places = np.cumsum(work.samples) - 1
        for i in range(len(work.rows)):
            row, stop = int(work.rows[i]), int(ends[i])
            if row not in self._sums:
                continue
            total = self._sums[row]
            if total is not None:
                total += self._model.normed(hidden[stop - int(work.counts[i]) : stop]).float().sum(0)
            if work.samples[i]:
                last = self._model.normed(hidden[stop - 1 : stop])[0].float()
                length = int(work.starts[i] + work.counts[i])
                found[int(places[i])] = last if total is None else total / length
        return found
