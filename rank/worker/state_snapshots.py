"""Copies of sequences' states, which plans ask for (rank/scheduler/snapshots.py decides when).

Snapshots stand behind the rows in the tensors of what layers keep of a sequence: `rows` entries are of running
sequences, and the snapshots' numbers count from there. So a copy is one between entries of a tensor, on every rank of
what that rank keeps. Copies are enqueued in the step's CUDA stream, and nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...kernels.cache.block_rows import BlockRows
from .. import protocol
from ..model.cache_spec import Caches, CacheSpec
from .upload import Upload


class StateSnapshots:
    """State snapshots of one rank, used in the step thread alone."""

    def __init__(self, specs: Sequence[CacheSpec], caches: Caches, rows: int, upload: Upload):
        """caches: of the layers with these specs, made for `rows` sequences and the snapshots."""
        self._rows = rows
        self._upload = upload
        self._copies = BlockRows(states(specs, caches))

    def compile(self) -> None:
        """Before all steps, copy a row to itself: so no request waits for the kernel of the first copy."""
        if any(len(x) > self._rows for x in self._copies.parts):  # there are snapshots
            self._copy(np.zeros(1, np.int64), np.zeros(1, np.int64))

    def load(self, plan: protocol.Plan) -> None:
        """Before the plan's step: snapshots become the states of new sequences."""
        if plan.state_loads:
            slots, rows = _pairs(plan.state_loads)
            self._copy(slots + self._rows, rows)

    def save(self, plan: protocol.Plan) -> None:
        """After it: states become snapshots."""
        if plan.state_saves:
            rows, slots = _pairs(plan.state_saves)
            self._copy(rows, slots + self._rows)

    def _copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self._copies.copy(*self._upload.send([source, target]))


def states(specs: Sequence[CacheSpec], caches: Caches) -> list[Tensor]:
    """The tensors that have an entry for each sequence: of a layer's, those behind its blocks'."""
    return [x for spec, layer in zip(specs, caches, strict=True) for x in layer[len(layer) - len(spec.row()) :]]


def _pairs(packed: bytes) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.frombuffer(packed, np.uint32).astype(np.int64)
    return numbers[::2].copy(), numbers[1::2].copy()
