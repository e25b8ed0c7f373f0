"""Attention to a window and to entries of windows, compared with each token's own sum; entries, however chunks cut."""

from dataclasses import dataclass, field

import pytest
import torch
from phalanx.kernels.attention import compressed
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.kernels.attention.backend import Selection
from phalanx.kernels.attention.compressed import Compression

HEADS, DIM, WINDOW, BLOCKS = 3, 8, 5, 40


@dataclass
class Step:
    """A step of sequences with these lengths, of which it computes the last `query_lens` tokens."""

    query_lens: list[int]
    kv_lens: list[int]
    block_tables: torch.Tensor | None = None
    scratch: dict = field(default_factory=dict)
    query_len: int = 1

    def __post_init__(self):
        self.num_decodes = self.query_lens.count(self.query_len) if set(self.query_lens) == {self.query_len} else 0
        self.query_starts = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        self.lengths = torch.tensor(self.kv_lens, dtype=torch.int32)


def tables(lengths, size):
    """Blocks of each sequence, in any order."""
    most = max(-(-n // size) for n in lengths)
    return torch.randperm(BLOCKS)[: len(lengths) * most].view(len(lengths), most).int()


@pytest.mark.parametrize("queries, lengths", [([7, 40, 1], [7, 70, 33]), ([1, 1, 1], [1, 70, 32])])
@pytest.mark.parametrize("rate, chooses", [(0, False), (4, False), (4, True), (32, False)])
@pytest.mark.parametrize("most", [1, 1 << 20])
def test_attention(monkeypatch, queries, lengths, rate, chooses, most):
    """Slots that nothing was stored in are NaNs. most: bytes of what is gathered at once."""
    torch.manual_seed(0)
    monkeypatch.setattr(compressed, "GATHER_BYTES", most)
    size = 16
    each = compressed.entries_of(size, rate)
    assert compressed.tokens_of_block(size + each, rate) == size
    table = tables(lengths, size)
    step = Step(queries, lengths, table)
    keys = [torch.randn(n, DIM) for n in lengths]
    entries = [torch.randn(n // rate if rate else 0, DIM) for n in lengths]
    cache = torch.full((BLOCKS, size + each, DIM), torch.nan)
    for blocks, own, further in zip(table.long(), keys, entries, strict=True):
        for at, key in enumerate(own):
            cache[blocks[at // size], at % size] = key
        for w, entry in enumerate(further):
            cache[blocks[((w + 1) * rate - 1) // size], size + w % each] = entry
    q, sinks = torch.randn(sum(queries), HEADS, DIM), torch.randn(HEADS)
    slots, counts, want = torch.zeros(len(q), 3, dtype=torch.int32), torch.zeros(len(q), dtype=torch.int32), []
    for i, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        for at in range(length - count, length):
            seen = list(range((at + 1) // rate)) if rate else []
            if chooses:
                seen = seen[::2][:3]
                counts[len(want)] = len(seen)
                for place, w in enumerate(seen):
                    slots[len(want), place] = table[i, w // each] * each + w % each
            rows = torch.cat((keys[i][max(0, at + 1 - WINDOW) : at + 1], entries[i][seen]))
            scores = torch.cat((0.3 * q[len(want)] @ rows.t(), sinks[:, None]), 1)
            want.append(scores.softmax(1)[:, :-1] @ rows)
    chosen = Selection(slots, counts, counts.tolist()) if chooses else None
    params = AttentionParams(0.3, WINDOW, sinks=sinks)
    found = compressed.attend(q, cache, step, params, rate, size, chosen)
    assert torch.allclose(found, torch.stack(want), atol=1e-5)


@pytest.mark.parametrize("of", [Compression(4, DIM, overlaps=True), Compression(8, DIM)])
@pytest.mark.parametrize("query_len", [1, 3])
def test_entries_do_not_depend_on_chunks(of, query_len):
    """Prompts in chunks, then tokens one by one, or several of which some are taken back."""
    torch.manual_seed(0)
    total, rows = 60, torch.tensor([1])
    inputs = torch.randn(total, 2 * of.width)
    ring = torch.full((2, of.tokens + query_len - 2, 2 * of.width), torch.nan)
    found, start = {}, 0
    for count in [3, 1, 22, *[query_len] * 40]:
        stop = min(total, start + count)
        step = Step([stop - start], [stop], query_len=query_len)
        x = inputs[start:stop]
        windows = compressed.gather_windows(x, ring, rows, step, of)
        compressed.write_ring(x, ring, rows, step)
        made = compressed.compress(windows.inputs, windows.known, of)
        found |= {(start + int(at)) // of.rate: one for at, one in zip(windows.tokens, made, strict=True)}
        start = stop - (query_len - 1 if count == query_len and stop < total else 0)
        if stop == total:
            break
    values, gates = inputs.split(of.width, 1)
    for w in range(total // of.rate):
        own = slice(w * of.rate, (w + 1) * of.rate)
        if of.overlaps:
            before = slice(max(0, w - 1) * of.rate, w * of.rate)
            value = torch.cat((values[before, :DIM], values[own, DIM:]))
            gate = torch.cat((gates[before, :DIM], gates[own, DIM:]))
        else:
            value, gate = values[own], gates[own]
        assert torch.allclose(found[w], (value * gate.softmax(0)).sum(0), atol=1e-5), w


def test_rows_that_fill_a_captured_step_up_write_nothing():
    step = Step([1, 1], [6, 0])
    ring, x = torch.zeros(3, 7, 4), torch.randn(2, 4)
    compressed.write_ring(x, ring, torch.tensor([1, -1]), step)
    assert torch.equal(ring[1, 5], x[0]) and ring.count_nonzero() == 4
    cache = torch.zeros(2, 5, 4)
    compressed.store(x, cache, torch.tensor([7, -1]))
    assert torch.equal(cache[1, 2], x[0]) and cache.count_nonzero() == 4


def test_a_step_without_tokens():
    step, of = Step([], [], torch.zeros(0, 1, dtype=torch.int32)), Compression(4, DIM)
    x, ring, rows = torch.zeros(0, 2 * DIM), torch.zeros(2, 3, 2 * DIM), torch.zeros(0, dtype=torch.int64)
    windows = compressed.gather_windows(x, ring, rows, step, of)
    compressed.write_ring(x, ring, rows, step)
    assert len(compressed.compress(windows.inputs, windows.known, of)) == 0
    q, cache = torch.zeros(0, HEADS, DIM), torch.zeros(BLOCKS, 5, DIM)
    assert len(compressed.attend(q, cache, step, AttentionParams(1.0, WINDOW), 4, 4)) == 0
