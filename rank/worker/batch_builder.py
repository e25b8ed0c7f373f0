"""Builds the tensors that layers read, `Batch`, from a step's ScheduledBatch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..model.batch import Batch, StepArrays, slot_mappings, step_arrays
from ..model.cache_spec import Caches
from ..protocol import MADE
from .state import BatchState, ScheduledBatch
from .upload import Upload

TILE = 128  # rows of a GEMM's tile: microbatches are split at a multiple of it


def build_batches(
    state: BatchState,
    scheduled: ScheduledBatch,
    last: Tensor,
    caches: Caches,
    upload: Upload,
    last_token_only: bool = False,
    min_tokens: int = 0,
) -> tuple[list[Batch], Tensor]:
    """One step's microbatches, one or two, and the rows that are sampled ([S] int64), on the device of `last`.

    last: [max_num_seqs, 1 + drafts] int64, each row's newest sampled token and the drafts made behind it. They are
    written on the device; their ids may not have reached the host yet. last_token_only: the last layer computes sampled
    tokens only. min_tokens: a step is split into two microbatches where each gets at least so many tokens; 0: steps
    stay whole.
    """
    row = np.repeat(scheduled.rows, scheduled.counts)
    ids = given_ids(state, scheduled)
    unknown = ids < 0
    sampled_only = bool((ids == -1).all())
    arrays = [scheduled.sampled_rows, row if unknown.any() else row[:0], ids[:0] if sampled_only else ids]
    at = microbatch_split(state, scheduled, min_tokens) if min_tokens else 0
    parts = scheduled.cut(at) if at else [scheduled]
    batches = [HostBatch(state, part, last_token_only) for part in parts]
    sampled_rows, row_, ids_, *tensors = upload.send([*arrays, *(array for batch in batches for array in batch.arrays)])
    if sampled_only:
        ids_ = last[row_, 0]
    elif unknown.any():
        ids_ = torch.where(ids_ < 0, last[row_, (-1 - ids_).clamp(min=0)], ids_)
    left = iter(tensors)
    split_ids = ids_.split([batch.tokens for batch in batches])
    return [batch.batch(its_ids, left, caches) for batch, its_ids in zip(batches, split_ids, strict=True)], sampled_rows


def sampled_at(batches: list[Batch]) -> Tensor:
    """[S] indices of the sampled tokens among those of all microbatches."""
    if len(batches) == 1:
        return batches[0].sample_at
    starts = itertools.accumulate((len(one.ids) for one in batches[:-1]), initial=0)
    return torch.cat([one.sample_at + start for one, start in zip(batches, starts, strict=True)])


def microbatch_split(state: BatchState, scheduled: ScheduledBatch, min_tokens: int) -> int:
    """The split of a step: the number of tokens of its first microbatch, or 0 if it stays whole.

    Each microbatch has at least `min_tokens` tokens. A sequence that the split divides decodes in neither microbatch,
    because rows that decode must come first in a batch, and rows that decode are not divided.
    """
    decode = scheduled.query_len
    if ((scheduled.counts == decode) & (scheduled.starts < state.known[scheduled.rows])).any():
        # A prompt's single token, which stands among the decoding rows: a later row of the same step may write the
        # prefix-cache blocks that it reads. In the second microbatch that would be too late.
        return 0
    if state.spans and reach_of(state, scheduled) is not None:
        return 0  # the first microbatch's tokens would attend to keys of the second
    total = int(scheduled.counts.sum())
    at = (total + TILE) // (2 * TILE) * TILE
    ends = np.cumsum(scheduled.counts)
    i = int(np.searchsorted(ends, at))  # the sequence at the split
    begin, end = int(ends[i] - scheduled.counts[i]), int(ends[i])
    if at < end and (at == begin + decode or end - begin == decode):
        at = begin
    elif at == end - decode:
        at = end
    return at if min(at, total - at) >= min_tokens else 0


def batch_arrays(state: BatchState, scheduled: ScheduledBatch) -> StepArrays:
    """The arrays of a step: of eager steps, those captured in segments, the profile run, and CPU graphs."""
    return step_arrays(
        state.table, state.block_size, scheduled.rows, scheduled.starts, scheduled.counts, scheduled.sampled
    )


def rotary_positions(state: BatchState, scheduled: ScheduledBatch, positions: np.ndarray) -> np.ndarray:
    """The positions of a step's tokens as rotary embeddings read them: [T], or [axes, T] where some are in a prompt
    with images. positions: their indices in their sequences, [T], which they are where there are no images."""
    if not state.axes:
        return positions
    found = positions + np.repeat(state.shift[scheduled.rows], scheduled.counts)
    for row, start, count, first, _ in scheduled.spans():
        axes = state.axes.get(row)
        if axes is None or start >= axes.shape[1]:
            continue
        given = axes[:, start : start + count]
        if found.ndim == 1 and (given == given[0]).all():  # text
            found[first : first + given.shape[1]] = given[0]
            continue
        if found.ndim == 1:
            found = np.tile(found, (len(axes), 1))
        found[:, first : first + given.shape[1]] = given
    return found


def reach_of(state: BatchState, scheduled: ScheduledBatch) -> np.ndarray | None:
    """The last token of its sequence that each of a step's tokens attends to, [T] int32; None: all attend up to
    themselves."""
    found = None
    for row, start, count, first, _ in scheduled.spans() if state.spans else ():
        for begin, end in state.spans.get(row, ()):
            if begin < start + count and start < end - 1:  # the last token reaches no further than itself
                if found is None:
                    before = scheduled.starts - np.cumsum(scheduled.counts) + scheduled.counts
                    found = np.repeat(before, scheduled.counts) + np.arange(scheduled.counts.sum())
                found[first + max(0, begin - start) : first + min(count, end - start)] = end - 1
    return None if found is None else found.astype(np.int32)


def further_slot_mappings(
    state: BatchState, scheduled: ScheduledBatch, arrays: StepArrays
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Slots and block tables of the step in each cache group but the first, whose arrays are given."""
    return [
        slot_mappings(
            state.table, state.block_size, state.rows_of(scheduled.rows, group), scheduled.counts, arrays.positions,
            arrays.lengths,
        )
        for group in range(1, len(state.groups))
    ]  # fmt: skip


class HostBatch:
    """A Batch as numpy arrays, before the upload."""

    def __init__(self, state: BatchState, scheduled: ScheduledBatch, last_token_only: bool):
        made = batch_arrays(state, scheduled)
        self.scheduled = scheduled
        self.tokens = len(made.positions)
        self.kv_lens: list[int] = made.lengths.tolist()
        self.arrays = [*made]  # in the order in which `batch` reads them
        self.layer_groups, further = state.layer_groups, further_slot_mappings(state, scheduled, made)
        self.arrays[0] = rotary_positions(state, scheduled, made.positions)
        self.num_further = len(further)
        for mappings in further:
            self.arrays += mappings
        reach = reach_of(state, scheduled)
        self.reaches = reach is not None
        if reach is not None:
            self.arrays.append(reach)
        self.sampled: HostBatch | None = None
        if last_token_only and len(made.sample_at) < self.tokens:
            self.sampled = HostBatch(state, scheduled.sampled_tokens, False)
            self.arrays += self.sampled.arrays

    def batch(self, ids: Tensor, tensors: Iterator[Tensor], caches: Caches) -> Batch:
        """The batch on the device. Consumes the uploaded `arrays` from `tensors`."""
        arrays = StepArrays(*itertools.islice(tensors, len(StepArrays._fields)))
        further = [(next(tensors), next(tensors)) for _ in range(self.num_further)]
        reach = next(tensors) if self.reaches else None
        sampled = self.sampled.batch(ids[:0], tensors, caches) if self.sampled else None
        counts = self.scheduled.counts.tolist()
        of = ids, arrays, counts, self.kv_lens, caches, self.scheduled.query_len, reach
        batch = Batch.of(*of, sampled=sampled)
        batch.add_groups(further, self.layer_groups)
        return batch


def following_ids(state: BatchState, scheduled: ScheduledBatch) -> np.ndarray:
    """[T] int64 id of the token behind each of a step's tokens; 0 where the step or an earlier one samples it."""
    found = [
        state.tokens[row][first + 1 : first + count + 1]
        for row, first, count in zip(scheduled.rows, scheduled.starts, scheduled.counts, strict=True)
    ]
    pads = (np.pad(one, (0, count - len(one))) for one, count in zip(found, scheduled.counts, strict=True))
    return np.concatenate([*pads, np.zeros(0, np.int64)])


def given_ids(state: BatchState, scheduled: ScheduledBatch) -> np.ndarray:
    """[T] int64 token ids. Those that only the device knows are -1, for a row's newest token, -2, for the first draft
    made behind it, and so on."""
    ids = np.full(int(scheduled.counts.sum()), -1, np.int64)
    starts = np.cumsum(scheduled.counts) - scheduled.counts
    for i in np.flatnonzero(scheduled.starts < state.known[scheduled.rows]).tolist():
        row, first, count = int(scheduled.rows[i]), int(scheduled.starts[i]), int(scheduled.counts[i])
        tokens = state.tokens[row][first : first + count]
        ids[starts[i] : starts[i] + len(tokens)] = tokens
    if scheduled.drafts is not None:
        of_rows = ids[: len(scheduled.drafts) * scheduled.query_len].reshape(-1, scheduled.query_len)
        made = -2 - np.arange(scheduled.query_len - 1)
        drafts = np.maximum(scheduled.drafts, 0)  # any token where there is no draft
        of_rows[:, 1:] = np.where(scheduled.drafts == MADE, made, drafts)
    return ids
