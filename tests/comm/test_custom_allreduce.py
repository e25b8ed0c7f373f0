"""The sum with the norm, whatever carries it, and what is chosen for which sums."""

import logging

import pytest
import torch
from phalanx.comm import custom_allreduce, nccl, threads
from phalanx.comm.base import all_reduce_add_norm
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.kernels.collective import allreduce, allreduce_norm
from phalanx.kernels.norm.norm import add_rms_norm_reference
from phalanx.rank.__main__ import Rank
from phalanx.rank.options import Job, Options


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_with_the_norm(size, dtype):
    torch.manual_seed(0)
    parts, residual, weight = (
        torch.randn(size, 5, 33).to(dtype),
        torch.randn(5, 33).to(dtype),
        torch.randn(33).to(dtype),
    )
    want = allreduce_norm.all_reduce_add_norm_reference(list(parts), residual.clone(), weight, 1e-5)
    total = allreduce.all_reduce_reference(list(parts))
    assert torch.equal(want[1], residual + total)
    assert torch.equal(want[0], add_rms_norm_reference(total, residual.clone(), weight, 1e-5)[0])

    def one(comm):
        return all_reduce_add_norm(comm, parts[comm.rank].clone(), residual.clone(), weight, 1e-5)

    for normed, stream in threads.run(one, size):
        bound = 1e-6 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(stream, want[1], atol=bound, rtol=bound)
        torch.testing.assert_close(normed, want[0], atol=bound, rtol=bound)


def test_what_the_kernels_take():
    x = torch.empty(256, 8192, dtype=torch.bfloat16)  # 4 MiB
    assert allreduce.supports(x, 4) and allreduce.supports(x, 8) and not allreduce.supports(x, 9)
    assert not allreduce.supports(torch.empty(513, 8192, dtype=torch.bfloat16), 2)
    assert not allreduce.supports(x[:1].long(), 2)


@pytest.mark.parametrize(
    "why, why_not_dma, said",
    [
        ("", "", []),
        ("rank 1 is elsewhere", "", ["all-reduces go over NCCL alone: rank 1 is elsewhere"]),
        ("", "rank 0: no such call", ["large all-reduces go over NCCL: rank 0: no such call"]),
    ],
)
def test_the_log_says_why_nccl_does_it(monkeypatch, caplog, why, why_not_dma, said):
    class Group:
        def __init__(self, host):
            self.rank, self.size, self.why, self.why_not_dma = host.rank, host.size, why, why_not_dma

    monkeypatch.setattr(nccl, "NcclComm", lambda host: host)
    monkeypatch.setattr(custom_allreduce, "CustomAllReduceComm", Group)

    def one(comm):
        rank = Rank(Job(options=Options(tp=2)), comm, ["here"] * 2, LocalWatchdog(comm.rank))
        assert rank._mesh(torch.device("cuda"))[1].tensor.size == 2

    with caplog.at_level(logging.INFO, "phalanx"):
        threads.run(one, 2)
    assert caplog.messages == said


@pytest.mark.parametrize("count, calls", [(1, [1]), (8, [8]), (9, [8, 1]), (20, [8, 8, 4])])
def test_async_all_reduces_are_copied_in_chunks(monkeypatch, count, calls):
    """The last piece's addition is left to what follows where it is the only one."""
    sent = []

    class Copies:
        def exchange(self, x):
            sent.append(len(x))
            return x + 1

    monkeypatch.setattr(custom_allreduce, "MAX_BYTES", 16)
    group = custom_allreduce.CustomAllReduceComm.__new__(custom_allreduce.CustomAllReduceComm)
    group._dma = Copies()
    x = torch.arange(count).bfloat16()
    rest = group.all_reduce_partial(x)
    assert sent == calls
    assert torch.equal(x if rest is None else x + rest, 2 * torch.arange(count).bfloat16() + 1)
    assert (rest is None) == (len(calls) > 1)


def test_without_copies_nccl_makes_sums_beside_products(monkeypatch):
    monkeypatch.setattr(custom_allreduce.NcclComm, "all_reduce", lambda self, x: x.mul_(2))
    monkeypatch.setattr(custom_allreduce.allreduce, "supports", lambda x, ranks: False)
    group = custom_allreduce.CustomAllReduceComm.__new__(custom_allreduce.CustomAllReduceComm)
    group._dma, group.peers, group.size = None, None, 2
    x = torch.ones(3)
    assert group.all_reduce_partial(x) is None and x.tolist() == [2, 2, 2]


def test_two_ranks_send_everything_and_more_share_large_sums(monkeypatch):
    for name in ("one_way_push", "two_shot", "push"):
        monkeypatch.setattr(allreduce_norm, f"{name}_add_norm", lambda *asked, name=name: (name, *asked[5:]))

    def chosen(rows, size, width=8192):
        x = torch.empty(rows, width, dtype=torch.bfloat16)
        return allreduce_norm.all_reduce_add_norm(x, x, x[0], 1e-5, allreduce.SymmetricMemory(0, size, 0, 0, 108))

    assert [chosen(9, 2), chosen(512, 2)] == [("one_way_push", 108)] * 2
    assert [chosen(3, 3), chosen(128, 4), chosen(128, 8)] == [("push", 108, 1024)] * 3
    assert [chosen(129, 4), chosen(512, 8)] == [("two_shot",)] * 2
    assert chosen(120_000, 8, 8) == ("two_shot",)  # too short for a mailbox


def test_a_row_or_two_of_many_ranks_are_normed_after_the_sum():
    x = torch.empty(3, 8192, dtype=torch.bfloat16)
    assert [allreduce_norm.supports(x[:rows], 4) for rows in (1, 2, 3)] == [False, False, True]
    assert allreduce_norm.supports(x[:1], 2) and not allreduce_norm.supports(x, 9)


def test_blocks_of_many_threads_are_no_more_than_the_smallest_gpu_holds():
    assert allreduce.common_blocks([132, 132]) == 128 and allreduce.common_blocks([132, 108, 114]) == 108


class Gathering(custom_allreduce.CustomAllReduceComm):
    def __init__(self, comm, everybodys):
        self.peers, self.everybodys, self._agreed = comm, everybodys, False

    def all_gather(self, x):
        return torch.stack([x, *(x + other for other in self.everybodys)])


@pytest.mark.parametrize("others, agreed", [([0, 0, 0], True), ([0, 1, 0], False)])
def test_products_begin_sums_once_all_ranks_have_measured_the_same(others, agreed):
    peers = allreduce.SymmetricMemory(0, 4, 0, 0)
    vars(peers)["table"] = torch.zeros(4, dtype=torch.int64)
    group = Gathering(peers, others)
    custom_allreduce.agree_on_tuning(group)
    assert group._agreed is agreed
    alone = Gathering(None, others)
    custom_allreduce.agree_on_tuning(alone)
    one = torch.ones(1, 1)
    assert not alone._agreed and alone.gemm_all_reduce_add_norm(one, one, one, one[0], 1e-5) is None
    custom_allreduce.agree_on_tuning(object())
