"""CUDA graphs of a draft model: over the tokens of a captured step of the target, and over one token of each row.

Launched one by one, the kernels of a draft take the host longer than the GPU. Logits and the choice of a token stay
outside: they depend on what a row asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...kernels.segmented_graph import SegmentedGraph
from ..model.batch import Batch, StepArrays
from ..model.drafts import DraftSource
from .graphs import DecodeGraphs
from .upload import Upload


class DraftGraphs:
    """Made and used in the step thread, on its CUDA stream. Rows that fill a captured step up write no keys and read
    none."""

    def __init__(
        self, source: DraftSource, target: DecodeGraphs, own: Callable[[Batch, Tensor], Batch], upload: Upload,
        block_size: int,
    ):  # fmt: skip
        """own: a batch with these ids, as the source's layers read it."""
        self.source, self.target, self.own, self.upload, self.block_size = source, target, own, upload, block_size
        several = [size for size, query_len in target.steps if query_len > 1]
        self._keys = [one for one in target.steps if one[0] <= max(several, default=0)]
        rows, tokens = max(several, default=0), max(map(math.prod, self._keys), default=0)
        device = upload.device
        self._next_ids = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        # Each row's newest token, by its place among the step's; the next draft's id, its index in the sequence, and
        # the last index that has a block. Positions are indices: images alone move them, and no model that another one
        # drafts for takes images.
        self._newest, self._ids, self._index, self._most = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._made: Tensor | None = None  # [rows, hidden] what the source has computed of each row's newest token
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._captured: dict[tuple[int, int], tuple[SegmentedGraph, SegmentedGraph]] = {}

    def capture(self, reached: Callable[[int], None]) -> None:
        """Capture all sizes, the largest first, so that the others reuse its memory. Calls reached(sizes done)."""
        for done, key in enumerate(sorted(self._keys, key=math.prod, reverse=True)):
            reached(done)
            self._captured[key] = self._capture(partial(self._follow, *key)), self._capture(partial(self._go_on, *key))

    def supports(self, rows: int, query_len: int) -> bool:
        return any(size >= rows for size, length in self._captured if length == query_len)

    def follow(self, query_len: int, next_ids: Tensor, newest: Tensor, most: np.ndarray) -> Tensor | None:
        """Run the source over the tokens of the step that the target has replayed last: its [R, hidden] of rows' newest
        tokens, or None where it has not read those yet. Valid until the next call, as what `go_on` returns.

        next_ids, newest: as DraftStep has them. most: [R] int64, the last indices for which rows have blocks."""
        rows = len(newest)
        self._next_ids[: len(next_ids)].copy_(next_ids)
        self._newest[:rows].copy_(newest)
        self._most[:rows].copy_(self.upload.send([most])[0])
        self._current = min(key for key in self._captured if key[0] >= rows and key[1] == query_len)
        self._captured[self._current][0].replay(len(next_ids))
        return self._made[:rows] if self.source.FOLLOWS and self._made is not None else None

    def go_on(self, ids: Tensor) -> Tensor:
        """The source's [R, hidden] of one further token of each row."""
        self._ids[: len(ids)].copy_(ids)
        self._captured[self._current][1].replay(len(ids))
        assert self._made is not None
        return self._made[: len(ids)]

    def _capture(self, run: Callable[[], Tensor]) -> SegmentedGraph:
        # A warm-up: compiling, loading and first allocations must not happen in a capture.
        run()
        torch.cuda.current_stream().synchronize()
        segmented = SegmentedGraph(self._pool)
        segmented.capture(run)
        return segmented

    def _follow(self, size: int, query_len: int) -> Tensor:
        batch, hidden = self.target.captured_step(size, query_len)
        newest = self._newest[:size].clamp(max=size * query_len - 1)
        torch.add(batch.lengths, 1 - query_len + newest % query_len, out=self._index[:size])
        if not self.source.FOLLOWS:
            return self.source.forward(self.own(batch, batch.ids), None)
        ids = self._next_ids[: size * query_len]
        return self._keep(self.source.forward(self.own(batch, ids), self.source.read(hidden))[newest])

    def _go_on(self, size: int, query_len: int) -> Tensor:
        """One token of each row, at the places behind the newest ones. Those for which a row has no block are computed
        at its last place, as drafts that mean nothing."""
        target, _ = self.target.captured_step(size, query_len)
        index, real = torch.minimum(self._index[:size], self._most[:size]).clamp(min=0), target.rows >= 0
        at, within = index[:, None] // self.block_size, index % self.block_size
        tables = [one.block_tables for one in (target, *target.further)]
        slots = [torch.where(real, one.gather(1, at)[:, 0] * self.block_size + within, -1) for one in tables]
        starts = self._starts[: size + 1]
        arrays = StepArrays(
            index, slots[0], tables[0], torch.where(real, index + 1, 0).int(), target.rows, starts, starts[:-1].long()
        )  # fmt: skip
        batch = Batch.of(self._ids[:size], arrays, [1] * size, target.kv_lens, target.caches)
        batch.add_groups(zip(slots[1:], tables[1:], strict=True), target.layer_groups)
        before = self._made[:size] if self.source.FOLLOWS and self._made is not None else None
        self._index[:size] += 1
        return self._keep(self.source.forward(self.own(batch, batch.ids), before))

    def _keep(self, made: Tensor) -> Tensor:
        """`made`, where the next graph reads it."""
        if self._made is None:  # of the warm-up of the largest size
            self._made = made.new_zeros(len(self._ids), made.shape[1])
        self._made[: len(made)].copy_(made)
        return made
