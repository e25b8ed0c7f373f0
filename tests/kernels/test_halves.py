"""Halves of a layer as one compiled function, beside the operations that they are made of; sums over a board."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from phalanx.kernels import board, cpu, halves, linear
from phalanx.kernels.attention import Scores
from phalanx.kernels.embedding import embedding, embedding_reference
from phalanx.kernels.norm import add_rms_norm, rms_norm
from phalanx.kernels.rope import HeadNorms, rotation, rotation_reference

compiled = pytest.importorskip("phalanx.kernels.compiled", reason="Numba is not installed")
HIDDEN, HEADS, SLOT = 96, halves.Heads(4, 2, 16), 1024


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Norm:
    eps, alone = 1e-5, True

    def __init__(self, board=None):
        self.weight, self.board = torch.linspace(0.5, 1.5, HIDDEN), board

    def add(self, x, residual):
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)


def product(outputs, inputs, biased=False):
    return halves.Product(torch.randn(outputs, inputs) * 0.1, torch.randn(outputs) if biased else None)


def boards(ranks):
    slots, counts = np.full((2, ranks, SLOT), np.nan, np.float32), np.zeros(ranks * board.LINE, np.int64)
    return [board.Board(slots, counts, rank) for rank in range(ranks)]


def batch(lengths):
    tables = torch.arange(len(lengths) * 4, dtype=torch.int32).view(len(lengths), 4)
    positions = torch.tensor(lengths) - 1
    slots = tables.gather(1, positions[:, None] // 16)[:, 0].long() * 16 + positions % 16
    rows = SimpleNamespace(
        slots=slots, block_tables=tables, lengths=torch.tensor(lengths, dtype=torch.int32), query_starts=None,
        num_decodes=len(lengths), query_lens=[1] * len(lengths), kv_lens=lengths, scratch={},
    )  # fmt: skip
    return rows, rotation(torch.randn(64, 2, HEADS.dim // 2), positions)


def both_ways(monkeypatch, half):
    """half() as it is compiled and by torch, from the same x and residual; all rounded to what f32 can promise."""
    got = half()
    with monkeypatch.context() as without:
        without.setattr(cpu, "_compiled", lambda: None)
        want = half()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[1], [5, 40, 33], [20] * 16])
@pytest.mark.parametrize("normed, biased, first", [(False, False, False), (True, False, True), (False, True, False)])
@pytest.mark.parametrize("window", [0, 7])
def test_attention(monkeypatch, lengths, normed, biased, first, window):
    rows, turn = batch(lengths)
    qkv, out = product(8 * HEADS.dim, HIDDEN, biased), product(HIDDEN, 4 * HEADS.dim)
    norms = HeadNorms(torch.randn(HEADS.dim), torch.randn(HEADS.dim), 1e-6) if normed else None
    caches = torch.randn(2, 64, 16, HEADS.keys, HEADS.dim)
    x, residual = torch.randn(2, len(lengths), HIDDEN)

    def half():
        rows.scratch.clear()
        cache = tuple(part.clone() for part in caches)
        stream = None if first else residual.clone()
        scores = Scores(HEADS.dim**-0.5, window)
        return *halves.attention(x.clone(), stream, Norm(), qkv, HEADS, out, turn, norms, cache, rows, scores), *cache

    both_ways(monkeypatch, half)


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("biased", [False, True])
def test_feed_forward(monkeypatch, rows, biased):
    gate_up, down = product(2 * 80, HIDDEN), product(HIDDEN, 80, biased)
    x, residual = torch.randn(2, rows, HIDDEN)
    both_ways(monkeypatch, lambda: halves.feed_forward(x.clone(), residual.clone(), Norm(), gate_up, down))


def test_products_that_norm_their_rows(monkeypatch):
    """Where a rank is alone, for what suits; a product's bias, a first half and what has been added need the norm."""
    monkeypatch.setattr(halves.skinny, "suits_norm", lambda x, *_: len(x) < 3)
    monkeypatch.setattr(halves.skinny, "normed_linear", lambda *a: ("product", a))
    x, residual, alone, shared = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN), Norm(), Norm()
    plain, biased, shared.alone = product(8, HIDDEN), product(8, HIDDEN, biased=True), False
    got = halves._normed(x, residual, alone, plain, gated=True)
    assert got == ("product", (x, residual, alone.weight, alone.eps, plain.weight, True))
    for norm, one, stream in ((shared, plain, residual), (alone, biased, residual), (alone, plain, None)):
        y, total = halves._normed(x.clone(), None if stream is None else stream.clone(), norm, one)
        normed, want = alone.add(x.clone(), None if stream is None else stream.clone())
        torch.testing.assert_close(y, linear.linear(normed, one.weight, one.bias))
        torch.testing.assert_close(total, want)
    norm = SimpleNamespace(alone=True, add=lambda x, residual: (x + 1, residual))
    torch.testing.assert_close(halves._normed(x, x, norm, plain)[0], linear.linear(x + 1, plain.weight))
    three = torch.randn(3, HIDDEN)
    assert halves._normed(three, three.clone(), alone, plain)[0].shape == (3, 8)


def test_a_lone_rank_adds_a_product_to_the_stream_itself(monkeypatch):
    """Where that is faster; what comes back is one tensor then."""
    x, stream, weight = torch.randn(5, 80), torch.randn(5, HIDDEN), torch.randn(HIDDEN, 80)
    monkeypatch.setattr(halves, "adds", lambda *_: True)
    for alone in (True, False):
        residual = stream.clone()
        y, same = halves.Product(weight, alone=alone).onto(x, residual)
        assert same is residual and (y is residual) is alone
        torch.testing.assert_close(residual if alone else y + residual, stream + x @ weight.T, atol=2e-5, rtol=1e-4)
    monkeypatch.setattr(halves, "adds", lambda *_: False)
    y, _ = halves.Product(weight, alone=True).onto(x, stream)
    torch.testing.assert_close(y, x @ weight.T, atol=2e-5, rtol=1e-4)


def test_which_products_add_themselves():
    x, weight, stream = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((1024, 32), (48, 32), (1024, 48)))
    assert not linear.adds(x, weight, stream), "on a CPU"
    x, weight, stream = (OnGpu(t) for t in (x, weight, stream))
    assert linear.adds(x, weight, stream)
    assert not linear.adds(OnGpu(x[:1023]), weight, stream)
    assert not linear.adds(x, weight, OnGpu(torch.empty(48, 1024, dtype=torch.bfloat16).T)), "not contiguous"
    wide = [OnGpu(t.float()) for t in (x, weight, stream)]
    assert not linear.adds(*wide) and not linear.adds(x, weight, wide[2])


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("inputs", [32, 96, 100])
def test_products_of_rows_that_vectors_divide_and_do_not(inputs):
    x, weight, y = (
        np.random.randn(3, inputs).astype("f4"),
        np.random.randn(9, inputs).astype("f4"),
        np.zeros((3, 9), "f4"),
    )
    compiled.linear(x, weight, y)
    np.testing.assert_allclose(y, x @ weight.T, atol=1e-4)


def test_embedding_and_rotation():
    weight, table = torch.randn(10, 6), torch.randn(20, 2, 4)
    ids, positions = torch.tensor([3, 12, 4, 13, 40]), torch.tensor([7, 0])
    assert torch.equal(embedding(ids, weight, 4, False), embedding_reference(ids, weight, 4, False))
    for got, want in zip(rotation(table, positions), rotation_reference(table, positions), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_ranks_that_are_late_by_turns(ranks):
    """More calls than slots, and pauses long enough for a rank that waits to give up looking, and to sleep."""
    calls = 12
    parts, weight = torch.randn(calls, ranks, 2, 16), torch.randn(16)
    found = {}

    def rank(mine):
        residual = torch.zeros(2, 16)
        for call in range(calls):
            if (call + mine.rank) % 5 == 0:
                time.sleep(0.005)
            x = parts[call, mine.rank].clone()
            mine.meet(compiled.all_reduce_add_norm, x.numpy(), residual.numpy(), weight.numpy(), 1e-5)
            found[call, mine.rank] = x.clone(), residual.clone()

    threads = [threading.Thread(target=rank, args=(one,), daemon=True) for one in boards(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stream = torch.zeros(2, 16)
    for call in range(calls):
        x, stream = add_rms_norm(parts[call].sum(0), stream, weight, 1e-5)
        for r in range(ranks):
            torch.testing.assert_close(found[call, r][0], x, atol=1e-5, rtol=1e-4)
            assert torch.equal(found[call, r][1], found[call, 0][1])


def test_a_half_meets_the_others_first():
    weights, x, residual = (
        (product(2 * 80, HIDDEN), product(HIDDEN, 80)),
        torch.randn(2, 1, HIDDEN),
        torch.randn(1, HIDDEN),
    )
    want = halves.feed_forward(x.sum(0), residual.clone(), Norm(), *weights)
    got = {}

    def rank(mine):
        got[mine.rank] = halves.feed_forward(x[mine.rank].clone(), residual.clone(), Norm(mine), *weights)

    threads = [threading.Thread(target=rank, args=(one,), daemon=True) for one in boards(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for r in range(2):
        for one, other in zip(got[r], want, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_what_a_board_takes():
    (alone,) = boards(1)
    assert alone.takes(torch.zeros(2, SLOT // 2)) and not alone.takes(torch.zeros(2, SLOT))
    assert alone.takes(torch.zeros(SLOT // 4), 4) and not alone.takes(torch.zeros(SLOT // 4), 5)
    assert not alone.takes(torch.zeros(0, 4)) and not alone.takes(torch.zeros(4, dtype=torch.bfloat16))
