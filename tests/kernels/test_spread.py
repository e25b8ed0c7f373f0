"""Products that are spread over a group's ranks: which, where their parts go, and who ends their sums."""

import pytest
import torch
from phalanx.comm import oneshot
from phalanx.kernels import library, spread
from phalanx.kernels.allreduce import LANDING, SENT, Peers
from phalanx.kernels.halves import Product

from .cublaslt import BF16, SIZES, Lib, in_memory, plain, put, way

FIRST = way(0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Regions are landings alone, and small products are worth it."""
    monkeypatch.setattr(spread, "landing_at", lambda size: 0)
    monkeypatch.setattr(spread, "SENT", 0)


def test_what_is_spread(monkeypatch):
    monkeypatch.setattr(spread, "SENT", SENT)
    weight, peers = torch.empty(8192, 64, dtype=BF16, device="meta"), Peers(0, 4, 0, 0)
    assert [rows for rows in (1, 128, 129, 512, 513) if spread.suits(rows, weight, peers)] == [129, 512]
    assert not spread.suits(512, weight, Peers(0, 2, 0, 0)), "of two ranks spread sums were not measured"
    assert not spread.suits(512, weight[:8176], peers), "a share of 4088 bytes"
    assert not spread.suits(512, weight, Peers(0, 3, 0, 0))
    narrow = torch.empty(2304, 64, dtype=BF16, device="meta")
    assert spread.suits(512, narrow, peers) and not spread.suits(511, narrow, peers), "not aligned for the library"


def test_each_rank_gets_its_share_of_all_parts(monkeypatch):
    size, rows, share = 4, 80, 12
    _, regions = in_memory(size)
    xs, weights = [plain(rows, 32) for _ in range(size)], [plain(size * share, 32) for _ in range(size)]
    for rank in range(size):
        peers = Peers(rank, size, regions.data_ptr(), LANDING)
        vars(peers)["landing"] = regions[rank]
        lib = put(Lib(), {spread.sizes(weights[rank], peers): {rows: way(1)}}, monkeypatch)
        y = spread.product(xs[rank], weights[rank], peers)
        assert lib.seen == [(1, weights[rank].data_ptr())]
        assert y.shape == (rows, size * share) and y.dtype == BF16 and y.data_ptr() == regions[rank].data_ptr()
    for rank in range(size):
        landed = regions[rank].view(BF16)[: size * rows * share].view(size, rows, share)
        for source in range(size):
            want = xs[source] @ weights[source][rank * share : (rank + 1) * share].T
            assert torch.equal(landed[source], want)
        assert (regions[rank][size * rows * share * 2 :] == 0xFF).all()


def test_nothing_begins_where_nothing_was_measured(monkeypatch):
    peers, regions = in_memory(3)
    weight = plain(48, 32)
    assert spread.product(plain(80, 32), weight, peers) is None, "no library"
    put(Lib(), {spread.sizes(weight, peers): {80: FIRST, 96: None}, SIZES: {112: FIRST}}, monkeypatch)
    for x in (plain(81, 32), plain(96, 32), plain(112, 32), plain(80, 32, torch.float16)):
        assert spread.product(x, weight, peers) is None
    assert (regions == 0xFF).all()
    put(Lib(works=()), {spread.sizes(weight, peers): {80: FIRST}}, monkeypatch)
    for x in (plain(80, 32), plain(80, 64)[:, :32]):
        with pytest.raises(RuntimeError, match="cuBLASLt refuses 80 rows times .*, which it has measured"):
            spread.product(x, weight, peers)


def test_what_ranks_compare(monkeypatch):
    peers, _regions = in_memory(3)
    weight, device = plain(48, 32), torch.device("cpu")
    assert spread.measured(device) == []
    choices = {96: way(1), 80: FIRST, 112: None}
    put(Lib(), {spread.sizes(weight, peers): choices, SIZES: {80: FIRST}}, monkeypatch)
    assert spread.measured(device) == [(48, 32, 80), (48, 32, 96)]


def test_a_group_begins_one_product_at_a_time(monkeypatch):
    peers, _regions = in_memory(3)
    weight, x = plain(48, 32), plain(80, 32)
    put(Lib(), {spread.sizes(weight, peers): {80: FIRST}}, monkeypatch)
    ended = []

    def add_norm(landed, residual, weight, eps, peers):
        ended.append((landed.data_ptr(), residual.sum().item(), eps))
        return residual, residual + 1

    monkeypatch.setattr(spread, "add_norm", add_norm)
    group = oneshot.OneShotComm.__new__(oneshot.OneShotComm)
    group.peers, group.size, group._landing, group._agreed = peers, 3, 0, True
    product = Product(weight, begin=lambda x, w: oneshot.begin_product(group, x, w))
    y = product(x)
    assert y.data_ptr() == peers.landing.data_ptr()
    group.begin_all_reduce(y)  # it has begun
    other = product(x)  # while that sum has not ended
    assert torch.equal(other, x @ weight.T) and other.data_ptr() != y.data_ptr()
    residual = torch.ones_like(other)
    assert oneshot.all_reduce_add_norm(group, y, residual, weight[0], 1e-5)[0] is residual
    y = product(x)
    assert y.data_ptr() == peers.landing.data_ptr()
    assert (group.all_reduce(y) == 1).all(), "the sum with nothing"
    assert ended == [(y.data_ptr(), residual.numel(), 1e-5), (y.data_ptr(), 0, 0.0)]
    assert product(plain(81, 32)).shape == (81, 48)


def test_other_groups_begin_none():
    assert oneshot.begin_product(object(), plain(80, 32), plain(48, 32)) is None
    assert not library.in_use
