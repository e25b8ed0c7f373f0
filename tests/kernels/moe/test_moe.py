"""Experts on CPUs, and what the GPU's kernels are given, against pair by pair in f32."""

import pytest
import torch
from phalanx.kernels.activation.activation import CLAMPED_SWIGLU
from phalanx.kernels.moe import expert_mlp, moe, plain_experts, quantized_experts
from phalanx.kernels.moe.group import group
from phalanx.kernels.quantized import cuda_layouts
from phalanx.kernels.quantized.packed_gemm import Packed
from phalanx.kernels.quantized.stack import Stack

from ..interpreter import interpret
from .cases import CASES, Sizes, biases, make, near, share_of, shares, strided, without_gate
from .reference import fused_experts_reference


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [*CASES, Sizes(0, 2, 4, 16, 8)])
def test_on_cpus(sizes, dtype, bound):
    given = make(sizes, dtype)
    near(moe.fused_experts(given), fused_experts_reference(given), bound)


@pytest.mark.parametrize("sizes", CASES)
def test_biases_and_the_clamped_swiglu(sizes):
    given = make(sizes, torch.float32)
    added = biases(given)
    for part in (added, added._replace(down=None)):
        one = given._replace(act=CLAMPED_SWIGLU, biases=part)
        near(moe.fused_experts(one), fused_experts_reference(one), 1e-5)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [*CASES, Sizes(0, 2, 4, 16, 8), Sizes(99, 2, 4, 16, 8)])
def test_experts_without_a_gate(sizes, dtype, bound):
    given = without_gate(make(sizes, dtype))
    near(moe.fused_experts(given), fused_experts_reference(given), bound)


def test_strided_input():
    given = make(Sizes(5, 2, 4, 16, 8), torch.float32)
    wide = torch.randn(5, 40)
    wide[:, 3:19] = given.x
    want = fused_experts_reference(given)
    near(moe.fused_experts(given._replace(x=wide[:, 3:19])), want, 3e-6)
    assert not any(one.is_contiguous() for one in strided(given)[:3])
    near(moe.fused_experts(strided(given)), want, 3e-6)


@pytest.mark.parametrize("sizes", [*CASES, Sizes(0, 2, 4, 16, 8)])
def test_the_parts_of_several_ranks_add_up(sizes):
    given, middle = make(sizes, torch.float32), sizes.experts // 2
    halves = moe.LocalExperts(0, middle, sizes.experts), moe.LocalExperts(middle, sizes.experts - middle, sizes.experts)
    sums = [moe.fused_experts(share_of(given, local_experts)) for local_experts in halves]
    near(sums[0] + sums[1], fused_experts_reference(given), 3e-6)
    for local_experts in shares(sizes.experts):
        own = share_of(given, local_experts)
        near(moe.fused_experts(own), fused_experts_reference(own), 3e-6)


def test_every_tiling_is_warmed_up():
    for experts, k in ((128, 8), (8, 2), (60, 4)):
        used = {plain_experts.tiling(n * k, experts, torch.bfloat16) for n in moe.warm_up_rows(experts, k)}
        assert used == set(plain_experts.TILINGS.values())
        w13, w2 = (Stack(Packed(torch.empty(0), 0, cuda_layouts.Q8_0), (experts, 64, n)) for n in (64, 32))
        rows = moe.warm_up_rows(experts, k)
        tiles = {quantized_experts.choose_tiled(n * k, experts, w13, w2, None).up.tiles for n in rows}
        assert tiles == {*quantized_experts.TILES.values(), quantized_experts.MAX_TILES}


@pytest.mark.parametrize(
    "rows, experts, hidden, inner, top, tiles",
    [
        (16, 64, 2048, 1408, 6, 1),  # DeepSeek-V2-Lite
        (64, 64, 2048, 1408, 6, 2),
        (64, 128, 2048, 768, 8, 1),  # Qwen3-30B-A3B
        (16, 8, 4096, 14336, 2, 1),  # Mixtral-8x7B
        (100, 64, 2048, 1408, 6, 4),
        (16, 20, 128, 192, 3, 1),
        (64, 128, 2688, 1856, 6, 1),  # Nemotron 3 Nano
        (128, 128, 2688, 928, 6, 2),
    ],
)
def test_items_of_one_launch(rows, experts, hidden, inner, top, tiles):
    """A router's blocks, of 9 KB and 1 KB for the system, fit beside it, which has as much."""
    assert expert_mlp.choose_tiles(rows * top, experts) == tiles
    stages, shared = expert_mlp.stages(expert_mlp.choose_chunk(hidden, inner), tiles)
    assert stages >= 4 and shared + (1 << 10) + (10 << 10) <= 228 << 10
    most = max(expert_mlp.TILES) * experts
    warm = {expert_mlp.choose_tiles(n * top, experts) for n in moe.warm_up_rows(experts, top) if n * top <= most}
    assert warm == {1, 2, 4}


@pytest.mark.parametrize("elements, parts", [(1, 7), (600, 4), (10**6, 1)])
def test_parts_of_experts_have_each_tile_once(monkeypatch, elements, parts):
    monkeypatch.setattr(plain_experts, "AT_ONCE", elements)
    groups, found = group(make(Sizes(50, 3, 7, 16, 20, "few"), torch.float32).ids, 7, 4), []
    ranges = list(plain_experts.ranges(7, 16, 16))
    assert len(ranges) == parts and [e for one in ranges for e in range(*one)] == list(range(7))
    for first, last in ranges:
        mine = plain_experts.part_of(groups, first, last)
        assert int(mine.tile_expert.max()) < last - first and torch.equal(
            mine.offsets, groups.offsets[first : last + 1]
        )
        assert parts > 1 or mine is groups  # nothing is launched for what is one part
        needed = mine.tile_expert >= 0
        assert needed.tolist() == sorted(needed.tolist(), reverse=True)  # kernels end at the first that is not needed
        found += zip((mine.tile_expert + first)[needed].tolist(), mine.tile_start[needed].tolist(), strict=True)
    needed = groups.tile_expert >= 0
    assert found == list(zip(groups.tile_expert[needed].tolist(), groups.tile_start[needed].tolist(), strict=True))


@pytest.mark.long
@pytest.mark.timeout(330)  # a process that other processes may slow down
def test_triton_kernels_in_the_interpreter():
    interpret("moe.cases")
