"""GEMMs whose sums a group's ranks scatter: which, where their parts go, and who ends their sums."""

import pytest
import torch
from phalanx.comm import custom_allreduce
from phalanx.kernels.collective.allreduce import RECV_BUFFER, SENT, SymmetricMemory
from phalanx.kernels.gemm import cublaslt, gemm_reduce_scatter

from .cublaslt import BF16, SIZES, Lib, algo, in_memory, near, plain, put

FIRST = algo(0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Symmetric memory is receive buffers alone, and small matmuls are worth it."""
    monkeypatch.setattr(gemm_reduce_scatter, "recv_buffer_at", lambda size: 0)
    monkeypatch.setattr(gemm_reduce_scatter, "SENT", 0)


def test_which_are_scattered(monkeypatch):
    monkeypatch.setattr(gemm_reduce_scatter, "SENT", SENT)
    weight, peers = torch.empty(8192, 64, dtype=BF16, device="meta"), SymmetricMemory(0, 4, 0, 0)
    assert [rows for rows in (1, 128, 129, 512, 513) if gemm_reduce_scatter.supports(rows, weight, peers)] == [129, 512]
    assert not gemm_reduce_scatter.supports(512, weight, SymmetricMemory(0, 2, 0, 0)), (
        "of two ranks scattered sums were not measured"
    )
    assert not gemm_reduce_scatter.supports(512, weight[:8176], peers), "4088 bytes each"
    assert not gemm_reduce_scatter.supports(512, weight, SymmetricMemory(0, 3, 0, 0))
    narrow = torch.empty(2304, 64, dtype=BF16, device="meta")
    assert gemm_reduce_scatter.supports(512, narrow, peers) and not gemm_reduce_scatter.supports(511, narrow, peers), (
        "not aligned for the library"
    )


@pytest.mark.parametrize("biased", [False, True])
def test_each_rank_gets_its_share_of_all_parts(biased, monkeypatch):
    """One of them adds a bias, of which each gets its share, too."""
    size, rows, share = 4, 80, 12
    (bias,) = plain(1, size * share)
    _, regions = in_memory(size)
    xs, weights = [plain(rows, 32) for _ in range(size)], [plain(size * share, 32) for _ in range(size)]
    for rank in range(size):
        peers = SymmetricMemory(rank, size, regions.data_ptr(), RECV_BUFFER)
        vars(peers)["recv_buffer"] = regions[rank]
        added = bias if biased and rank == 1 else None
        wanted = gemm_reduce_scatter.sizes(weights[rank], peers, added is not None)
        lib = put(Lib(), {wanted: {rows: algo(1)}}, monkeypatch)
        y = gemm_reduce_scatter.gemm_reduce_scatter(xs[rank], weights[rank], peers, added)
        assert lib.seen == [(1, weights[rank].data_ptr())]
        assert y.shape == (rows, size * share) and y.dtype == BF16 and y.data_ptr() == regions[rank].data_ptr()
    for rank in range(size):
        landed = regions[rank].view(BF16)[: size * rows * share].view(size, rows, share)
        for source in range(size):
            here = slice(rank * share, (rank + 1) * share)
            if biased and source == 1:
                near(landed[source], xs[source], weights[source][here], bias[here])
            else:
                assert torch.equal(landed[source], xs[source] @ weights[source][here].T)
        assert (regions[rank][size * rows * share * 2 :] == 0xFF).all()


def test_nothing_begins_where_nothing_was_measured(monkeypatch):
    peers, regions = in_memory(3)
    weight = plain(48, 32)
    assert gemm_reduce_scatter.gemm_reduce_scatter(plain(80, 32), weight, peers) is None, "no library"
    put(Lib(), {gemm_reduce_scatter.sizes(weight, peers): {80: FIRST, 96: None}, SIZES: {112: FIRST}}, monkeypatch)
    for x in (plain(81, 32), plain(96, 32), plain(112, 32), plain(80, 32, torch.float16)):
        assert gemm_reduce_scatter.gemm_reduce_scatter(x, weight, peers) is None
    assert (regions == 0xFF).all()
    put(Lib(works=()), {gemm_reduce_scatter.sizes(weight, peers): {80: FIRST}}, monkeypatch)
    for x in (plain(80, 32), plain(80, 64)[:, :32]):
        with pytest.raises(RuntimeError, match="cuBLASLt.*refuses 80"):
            gemm_reduce_scatter.gemm_reduce_scatter(x, weight, peers)
    put(Lib(), {gemm_reduce_scatter.sizes(weight, peers, bias=True): {80: FIRST}}, monkeypatch)
    with pytest.raises(RuntimeError, match="bias=True.*measured"):  # it cannot be read
        gemm_reduce_scatter.gemm_reduce_scatter(plain(80, 32), weight, peers, plain(2, 48).view(-1)[1:49])


def test_what_ranks_compare(monkeypatch):
    peers, _regions = in_memory(3)
    weight, device = plain(48, 32), torch.device("cpu")
    assert gemm_reduce_scatter.measured(device) == []
    choices = {96: algo(1), 80: FIRST, 112: None}
    unbiased, biased = (gemm_reduce_scatter.sizes(weight, peers, bias) for bias in (False, True))
    want = [(48, 32, 80, True), (48, 32, 96, True), (48, 32, 112, False)]
    for given in ({unbiased: choices}, {biased: choices}, {unbiased: choices, biased: choices}):
        put(Lib(), given | {SIZES: {80: FIRST}}, monkeypatch)
        assert gemm_reduce_scatter.measured(device) == want
    put(Lib(), {unbiased: choices, biased: choices | {80: None}}, monkeypatch)
    assert gemm_reduce_scatter.measured(device) == [(48, 32, 80, False), *want]  # the group has to see it


def test_a_group_fuses_gemm_and_all_reduce_where_that_was_measured(monkeypatch):
    peers, _regions = in_memory(3)
    weight, x = plain(48, 32), plain(80, 32)
    put(Lib(), {gemm_reduce_scatter.sizes(weight, peers): {80: FIRST}}, monkeypatch)
    ended = []

    def add_norm(received, residual, weight, eps, peers):
        ended.append((received.data_ptr(), residual.sum().item(), eps))
        return residual, residual + 1

    monkeypatch.setattr(gemm_reduce_scatter, "reduce_add_norm", add_norm)
    group = custom_allreduce.CustomAllReduceComm.__new__(custom_allreduce.CustomAllReduceComm)
    group.peers, group.size, group._agreed = peers, 3, True
    residual = torch.ones(80, 48, dtype=BF16)
    assert group.gemm_all_reduce_add_norm(x, weight, residual, weight[0], 1e-5)[0] is residual
    assert ended == [(peers.recv_buffer.data_ptr(), residual.numel(), 1e-5)]
    assert group.gemm_all_reduce_add_norm(plain(81, 32), weight, residual, weight[0], 1e-5) is None
    group._agreed = False
    assert group.gemm_all_reduce_add_norm(x, weight, residual, weight[0], 1e-5) is None
    assert len(ended) == 1 and not cublaslt.in_use.get(torch.device("cuda"))
