"""Ranks that add up over shared memory: threads here, as the operation waits without the interpreter's lock."""

import threading
import time

import pytest
import torch
from phalanx.kernels.collective import shm_allreduce
from phalanx.kernels.cpp import graph
from phalanx.kernels.norm.norm import add_rms_norm_reference
from phalanx.kernels.sampling.argmax import argmax, candidates, elect

SLOT = 1024


def boards(ranks):
    slots = torch.full((2, ranks, SLOT), float("nan"))
    counts = torch.zeros(ranks * shm_allreduce.LINE, dtype=torch.int64)
    return [shm_allreduce.ShmAllReduce(slots, counts, rank) for rank in range(ranks)]


def together(ranks, one):
    """one(rank) in a thread each; what they return."""
    found = [None] * ranks

    def run(rank):
        torch.set_num_threads(1)
        found[rank] = one(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums(isa, ranks):
    made = boards(ranks)
    sizes = [1, 5, 16, 33, SLOT] * 6
    xs = [torch.randn(ranks, size) for size in sizes]

    def one(rank):
        mine = [x[rank].clone() for x in xs]
        for x in mine:
            made[rank].all_reduce(x)
        return mine

    found = together(ranks, one)
    for i, x in enumerate(xs):
        torch.testing.assert_close(found[0][i], x.sum(0))
        assert all(torch.equal(found[0][i], other[i]) for other in found[1:]), "the same bits"
    assert [board.calls for board in made] == [len(sizes)] * ranks


def test_the_sum_with_the_norm(isa):
    made = boards(2)
    x, residual, weight = torch.randn(2, 3, 40), torch.randn(3, 40), torch.randn(40)
    want = add_rms_norm_reference(x.sum(0), residual.clone(), weight, 1e-5)

    def one(rank):
        mine, stream = x[rank].clone(), residual.clone()
        made[rank].all_reduce_add_norm(mine, stream, weight, 1e-5)
        return mine, stream

    for got in together(2, one):
        torch.testing.assert_close(got, want)


def test_the_argmax_over_ranks_is_recorded(isa):
    """Each rank's result, gathered and compared by all, and again by a replay."""
    made, x = boards(3), torch.randn(2, 3, 4, 50).round()  # [time, rank, row, id]: many ties

    def one(rank):
        mine, memory = x[0, rank].clone(), graph.Memory()
        choose = lambda: elect(made[rank].all_gather(candidates(argmax(mine), 50 * rank)))  # noqa: E731
        ids, recorded, reason = graph.capture(choose, memory)
        assert reason == "" and len(recorded) == 6
        first = ids.clone()
        mine.copy_(x[1, rank])
        recorded.replay()
        return first, ids.clone()

    want = x.permute(0, 2, 1, 3).flatten(2).argmax(-1)
    for got in together(3, one):
        assert torch.equal(torch.stack(got), want)


def test_who_waits_long_sleeps(isa):
    """Without the interpreter's lock, and next to no processor time; the sum comes once the other does."""
    made, used = boards(2), {}

    def one(rank):
        x = torch.ones(4)
        if rank == 1:
            time.sleep(0.5)  # longer than who waits looks before it sleeps
        before = time.thread_time()
        made[rank].all_reduce(x)
        used[rank] = time.thread_time() - before
        return x

    assert all((x == 2).all() for x in together(2, one))
    assert used[0] < 0.25


def test_what_it_takes():
    (board,) = boards(1)
    assert board.fits(torch.zeros(2, SLOT // 2)) and not board.fits(torch.zeros(SLOT + 1))
    assert not board.fits(torch.zeros(0)) and not board.fits(torch.zeros(8).bfloat16())
    assert board.fits(torch.zeros(SLOT // 3), 3) and not board.fits(torch.zeros(SLOT // 2), 3)
