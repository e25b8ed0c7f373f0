"""Batches of plans: every tensor, against one token at a time."""

import random

import numpy as np
import pytest
import torch
from phalanx.rank.worker import batch_builder as module
from phalanx.rank.worker import graphs
from phalanx.rank.worker.batch_builder import build_batches, given_ids, microbatch_split, reach_of
from phalanx.rank.worker.state import BatchState, ScheduledBatch
from phalanx.rank.worker.upload import Upload

BLOCK = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def make(seed: int) -> tuple[BatchState, ScheduledBatch, list[list[int]]]:
    """Rows in the middle of their lives; of each, all its token ids, those from `known` on only the sampler's."""
    draw = random.Random(seed)
    rows = BatchState(8, 64, BLOCK)
    rows.table[:] = np.random.default_rng(seed).permutation(rows.table.size).reshape(rows.table.shape)
    chosen = draw.sample(range(8), draw.randint(1, 6))
    tokens: list[list[int]] = [[]] * 8
    starts, counts, samples = [], [], []
    for i, row in enumerate(chosen):
        count = 1 if i < len(chosen) // 2 else draw.randint(2, 20)
        decodes = count == 1 and draw.random() < 0.7
        known = draw.randint(count, 40)
        start = known + draw.randint(0, 3) if decodes else draw.randint(0, known - count)
        tokens[row] = [draw.randrange(1000) for _ in range(64)]
        rows.tokens[row], rows.known[row] = np.array(tokens[row][:known]), known
        starts.append(start)
        counts.append(count)
        samples.append(decodes or draw.random() < 0.5)
    work = ScheduledBatch(
        np.array(chosen), np.array(starts), np.array(counts), np.array(samples), np.zeros(len(chosen), np.int64)
    )
    return rows, work, tokens


@pytest.mark.parametrize("device", DEVICES)
def test_prepare(device):
    upload = Upload(torch.device(device))
    for seed in range(60):
        rows, work, tokens = make(seed)
        last = torch.full((8, 1), -7)
        for row, start, known in zip(work.rows, work.starts, rows.known[work.rows], strict=True):
            if start >= known:
                last[row] = tokens[row][start]
        (batch,), sampled = build_batches(rows, work, last.to(device), [], upload)
        ids, positions, slots, at = [], [], [], []
        for row, start, count, samples in zip(work.rows, work.starts, work.counts, work.samples, strict=True):
            for p in range(start, start + count):
                ids.append(tokens[row][p])
                positions.append(p)
                slots.append(int(rows.table[row, p // BLOCK]) * BLOCK + p % BLOCK)
            if samples:
                at.append(len(ids) - 1)
        assert batch.ids.tolist() == ids and batch.positions.tolist() == positions and batch.slots.tolist() == slots
        assert batch.sample_at.tolist() == at and sampled.tolist() == work.rows[work.samples].tolist()
        assert batch.kv_lens == batch.lengths.tolist() == (work.starts + work.counts).tolist()
        assert batch.query_starts.tolist() == [0, *np.cumsum(work.counts).tolist()]
        assert batch.block_tables.tolist() == rows.table[work.rows, : -(-max(batch.kv_lens) // BLOCK)].tolist()
        assert batch.num_decodes == work.num_decodes and batch.query_lens == work.counts.tolist()
        (narrowed,), _ = build_batches(rows, work, last.to(device), [], upload, last_token_only=True)
        assert torch.equal(narrowed.ids, batch.ids) and torch.equal(narrowed.sample_at, batch.sample_at)
        if len(at) == len(ids):
            assert narrowed.sampled is None
        else:
            alone, chosen = narrowed.sampled, torch.from_numpy(work.samples)
            assert alone.positions.tolist() == [positions[i] for i in at] and alone.num_decodes == len(at)
            assert alone.kv_lens == alone.lengths.tolist() == batch.lengths.cpu()[chosen].tolist()
            assert alone.query_starts.tolist() == list(range(len(at) + 1)) and alone.query_lens == [1] * len(at)
            width = alone.block_tables.shape[1]
            assert torch.equal(alone.block_tables.cpu(), batch.block_tables.cpu()[chosen, :width])
        kinds = {
            batch.ids: torch.int64,
            batch.slots: torch.int64,
            batch.lengths: torch.int32,
            batch.block_tables: torch.int32,
        }
        assert all(tensor.dtype == dtype for tensor, dtype in kinds.items())


def test_tokens_of_images_reach_beyond_themselves(monkeypatch):
    """Token by token; such a step is not cut, and no row of it decodes where rows that do have several tokens."""
    monkeypatch.setattr(module, "TILE", 4)
    upload, draw, found = Upload(torch.device("cpu")), random.Random(5), 0
    for seed in range(60):
        rows, work, _ = make(seed)
        for row in range(8):
            begin = draw.randint(0, 20)
            rows.spans[row] = [(begin, begin + draw.randint(1, 9)), (begin + 10, begin + 30)]
        want = [
            next((end - 1 for first, end in rows.spans[row] if first <= p < end), p)
            for row, start, count in zip(work.rows, work.starts, work.counts, strict=True)
            for p in range(start, start + count)
        ]
        plain = [p for start, count in zip(work.starts, work.counts, strict=True) for p in range(start, start + count)]
        got = reach_of(rows, work)
        assert (want if got is None else got.tolist()) == want and (got is None) == (want == plain)
        last, fewest = torch.arange(8)[:, None], 0 if got is None else 5
        (batch, *more), _ = build_batches(rows, work, last, [], upload, min_tokens=fewest)
        assert not more and (batch.reach is None) == (got is None) and batch.num_decodes == work.num_decodes
        found += got is not None
        if got is not None:
            assert batch.reach.tolist() == want and batch.reach.dtype == torch.int32
            several = type(batch).of(batch.ids, module.batch_arrays(rows, work), [3], [3], [], 3, batch.reach)
            assert several.num_decodes == 0
    assert found > 20


def test_a_step_is_cut_like_chunks_of_prompts(monkeypatch):
    """Each token is in one part of a cut batch, as it was in the whole, and what is sampled keeps its order."""
    monkeypatch.setattr(module, "TILE", 4)
    upload, found = Upload(torch.device("cpu")), 0
    for seed in range(200):
        rows, work, _ = make(seed)
        last = torch.arange(8)[:, None]
        (whole,), sampled = build_batches(rows, work, last, [], upload)
        parts, same = build_batches(rows, work, last, [], upload, min_tokens=5)
        assert torch.equal(sampled, same)
        if len(parts) == 1:
            continue
        found += 1
        a, b = parts
        for name in ("ids", "positions", "slots"):
            assert torch.equal(torch.cat((getattr(a, name), getattr(b, name))), getattr(whole, name))
        assert min(len(a.ids), len(b.ids)) >= 5
        assert torch.equal(torch.cat((a.sample_at, b.sample_at + len(a.ids))), whole.sample_at)
        for part in parts:
            num_decodes = part.query_lens.count(1)
            assert part.num_decodes == num_decodes and part.query_lens[:num_decodes] == [1] * num_decodes
            ends = part.positions[part.query_starts[1:].long() - 1] + 1
            assert part.kv_lens == part.lengths.tolist() == ends.tolist()
        assert a.num_decodes + b.num_decodes == whole.num_decodes
        divided = len(a.kv_lens) + len(b.kv_lens) - len(whole.kv_lens)
        assert divided in (0, 1) and abs(len(a.ids) - len(b.ids)) <= (4 if divided else 6)
    assert found > 50


def counted(*counts, starts=None, known=0, query_len=1):
    """A step of so many tokens of each sequence."""
    work = ScheduledBatch(
        np.arange(len(counts)), np.zeros(len(counts), int) if starts is None else np.array(starts), np.array(counts),
        np.ones(len(counts), bool), np.zeros(len(counts), int), query_len,
    )  # fmt: skip
    rows = BatchState(len(counts), 1, 16)
    rows.known[:] = known
    return rows, work


@pytest.mark.parametrize(
    "counts, at",
    [
        ((4096,), 2048),
        ((2047,), 1024),
        ((2046,), 0),  # a part would have 1022
        ((2303,), 1152),
        ((1, 1, 1, 4000), 2048),
        ((2047, 2049), 2047),  # else the second sequence's first token would be alone
        ((2049, 2047), 2049),
        ((2046, 2, 2048), 2048),
        ((2047, 2, 2047), 2047),
        ((1024, 1024), 1024),
        ((1, *[128] * 32), 2049),
        ((100, 27), 0),
        ((1,), 0),
    ],
)
def test_where_a_step_is_cut(counts, at):
    assert microbatch_split(*counted(*counts), 1023) == at


@pytest.mark.parametrize(
    "counts, at",
    [
        ((4, 4, 4000), 2048),
        ((2044, 2052), 2044),  # else the second sequence's first four tokens would decode
        ((2052, 2044), 2052),
        ((2047, 2049), 2048),
    ],
)
def test_where_a_step_of_several_tokens_a_row_is_cut(counts, at):
    assert microbatch_split(*counted(*counts, query_len=4), 1023) == at
    assert microbatch_split(*counted(*[3] * 2000, query_len=3), 1023) == 2943  # rows that decode are not divided


def test_several_tokens_of_rows_that_decode():
    """They are sampled all; of a prompt beside them the last token is, or none."""
    rows, last = BatchState(4, 64, BLOCK), torch.zeros(4, 1, dtype=torch.int64)
    rows.table[:] = np.arange(rows.table.size).reshape(rows.table.shape)
    rows.tokens, rows.known[:] = [np.arange(64) + 100 * row for row in range(4)], 64
    work = ScheduledBatch(
        np.array([2, 0, 3, 1]), np.array([5, 10, 0, 7]), np.array([3, 3, 4, 2]),
        np.array([True, True, True, False]), np.array([1, 6, 0, 0]), 3,
    )  # fmt: skip
    (batch,), sampled = build_batches(rows, work, last, [], Upload(torch.device("cpu")), last_token_only=True)
    assert (batch.num_decodes, batch.query_len, batch.query_lens) == (2, 3, [3, 3, 4, 2])
    assert batch.ids.tolist() == [205, 206, 207, 10, 11, 12, 300, 301, 302, 303, 107, 108]
    assert batch.sample_at.tolist() == [0, 1, 2, 3, 4, 5, 9] and batch.lengths.tolist() == [8, 13, 4, 9]
    assert sampled.tolist() == work.sampled_rows.tolist() == [2, 2, 2, 0, 0, 0, 3]
    assert work.sampled_outputs.tolist() == [1, 2, 3, 6, 7, 8, 0] and work.newest_sampled.tolist() == [2, 5, 6]
    assert [one.sampled for one in work.spans()] == [2, 5, 6, -1]
    alone = batch.sampled
    assert (alone.num_decodes, alone.query_len, alone.lengths.tolist()) == (7, 1, [6, 7, 8, 11, 12, 13, 4])
    assert alone.rows.tolist() == sampled.tolist()


def test_a_prompts_single_token_keeps_a_step_whole():
    """Its beginning may be cached by what a later sequence of the same step writes."""
    assert microbatch_split(*counted(1, 4096, starts=[16, 0], known=16), 1024) == 2048
    assert microbatch_split(*counted(1, 4096, starts=[16, 0], known=17), 1024) == 0


def test_given_ids_are_negative_where_only_the_sampler_knows():
    rows = BatchState(3, 16, BLOCK)
    rows.tokens[1], rows.known[1] = np.array([5, 6, 7]), 3
    work = ScheduledBatch(
        np.array([0, 1]), np.array([4, 1]), np.array([1, 2]), np.array([True, True]), np.zeros(2, np.int64)
    )
    assert given_ids(rows, work).tolist() == [-1, 6, 7]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_uploads_do_not_overtake_each_other():
    """More uploads than there are buffers, each larger than the one before, while the device is busy."""
    upload = Upload(torch.device("cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    target = torch.zeros(1 << 18, dtype=torch.int32, device="cuda")
    sent, filled = [], []
    for i in range(12):
        busy = busy @ busy
        sent.append(upload.send([np.full(1000 * i, i), np.full((3, i), i, np.int32)]))
        upload.fill(target, [np.full(20000 * (i + 1), i, np.int32), np.array([i], np.int32)])
        filled.append(target[: 20000 * (i + 1) + 1].clone())
    for i, (a, b) in enumerate(sent):
        assert a.shape == (1000 * i,) and b.shape == (3, i) and (a == i).all() and (b == i).all()
        assert (filled[i] == i).all()


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000])
def test_captured_sizes_waste_little(most):
    sizes = graphs.capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, graphs.LARGEST)
    for n in range(1, sizes[-1] + 1):
        assert next(s for s in sizes if s >= n) <= max(n + 7, n * 1.25)
