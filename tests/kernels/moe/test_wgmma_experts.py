"""Grouped GEMMs of many pairs: for which they are, and the kernels thread by thread on a CPU."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.moe import moe, plain_experts
from phalanx.kernels.moe.group import group
from phalanx.kernels.moe.moe import LocalExperts

from .cases import Sizes, biases, encoded, make, near, share_of, without_gate
from .conftest import HOPPER
from .reference import fused_experts_reference


class Case(NamedTuple):
    sizes: Sizes
    rows: int
    biased: bool = False
    local_experts: LocalExperts | None = None
    gated: bool = True


CASES = [
    Case(Sizes(150, 2, 3, 64, 64), 128),
    Case(Sizes(90, 3, 5, 192, 320, "few"), 192, True),
    Case(Sizes(250, 1, 2, 128, 192, "one"), 192),
    Case(Sizes(130, 2, 6, 320, 64), 128, True, LocalExperts(2, 3, 6)),
    Case(Sizes(2200, 1, 1, 64, 64), 128),  # more tiles than a band has
]
UNGATED = [  # of one block of outputs, of one and a few more; inputs that fill no chunk
    Case(Sizes(100, 2, 3, 72, 200), 128, gated=False),
    Case(Sizes(90, 3, 5, 136, 264, "few"), 192, True, LocalExperts(1, 3, 5), gated=False),
]


@pytest.mark.parametrize(
    "case, dtype, bound",
    [
        (CASES[0], torch.bfloat16, 4e-2),
        *(pytest.param(one, torch.bfloat16, 4e-2, marks=pytest.mark.long) for one in CASES[1::2]),
        *(pytest.param(one, torch.float16, 6e-3, marks=pytest.mark.long) for one in CASES[2::2]),
        (UNGATED[0], torch.bfloat16, 4e-2),
        pytest.param(UNGATED[1], torch.float16, 6e-3, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_experts(on_hopper, case, dtype, bound):
    """Blocks have several items, the ring goes round, and tiles are not whole."""
    torch.manual_seed(0)
    given = make(case.sizes, dtype)
    given = given if case.gated else without_gate(given)
    given = given._replace(biases=biases(given)) if case.biased else given
    given = share_of(given, case.local_experts) if case.local_experts else given
    found = plain_experts.by_wgmma(given, case.rows)
    elsewhere = torch.ones(len(found), dtype=torch.bool)
    groups = group(given.ids, given.w13.shape[0], case.rows, case.local_experts)
    elsewhere[groups.sorted_ids[: int(groups.offsets[-1])].long()] = False
    assert found[elsewhere].isnan().all()  # what is of no pair stays as it is
    found[elsewhere] = 0
    y = found.float().view(*given.ids.shape, -1).sum(1).to(dtype)
    near(y, fused_experts_reference(given), bound * (2 if case.biased else 1))


def test_packed_experts_become_plain_some_at_a_time(on_hopper, monkeypatch):
    monkeypatch.setattr(plain_experts, "AT_ONCE", 3 * 64 * 64)
    given = make(Sizes(100, 2, 5, 64, 64), torch.bfloat16)
    packed = given._replace(w13=encoded(given.w13.nan_to_num(0)), w2=encoded(given.w2.nan_to_num(0)))
    plain = packed._replace(w13=packed.w13.plain(torch.bfloat16), w2=packed.w2.plain(torch.bfloat16))
    found, want = (plain_experts.by_wgmma(one, 128) for one in (packed, plain))
    assert torch.equal(found, want)


def test_what_they_are_for():
    def takes(x, w13, w2, found=HOPPER):
        return plain_experts.wgmma_takes(SimpleNamespace(x=x, w13=w13, w2=w2), found)

    x, w13, w2 = torch.zeros(1, 64).bfloat16(), encoded(torch.zeros(2, 128, 64)), encoded(torch.zeros(2, 64, 64))
    assert takes(x, w13, w2) and takes(x, torch.zeros(2, 128, 64, dtype=x.dtype), w2)
    assert not takes(x.float(), w13, w2)
    assert not takes(x, torch.zeros(2, 128, 64), w2)
    assert not takes(x, torch.zeros(2, 72, 64, dtype=x.dtype), torch.zeros(2, 64, 36, dtype=x.dtype))
    assert not takes(x, w13, w2, DeviceCaps(148, "sm_100", True, True, False))


def test_tiles():
    assert list(plain_experts.WGMMA_ROWS)[0] > moe.PLAIN_ROUTED
    for rows in plain_experts.WGMMA_ROWS.values():
        count, shared = plain_experts.wgmma_stages(rows)
        assert count >= 4 and shared + 16 * count <= plain_experts.MAX_SHARED


def test_all_tiles_are_warmed_up():
    for experts, k in ((128, 8), (8, 2), (60, 4)):
        tokens = [n for n in moe.warm_up_rows(experts, k) if n * k > moe.PLAIN_ROUTED * experts]
        used = {plain_experts.wgmma_rows(n * k, experts) for n in tokens}
        assert used == set(plain_experts.WGMMA_ROWS.values())
