"""Experts on CPUs, and what the GPU's kernels are given, against pair by pair in f32."""

import pytest
import torch
from phalanx.kernels.activation.activation import CLAMPED_SWIGLU
from phalanx.kernels.moe import dequantized, expert_gemm, expert_mlp, moe, quantized_experts

from ..interpreter import interpret
from .cases import CASES, Sizes, biases, make, near, share_of, shares, strided


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [*CASES, Sizes(0, 2, 4, 16, 8)])
def test_on_cpus(sizes, dtype, bound):
    given = make(sizes, dtype)
    near(moe.fused_experts(given), moe.fused_experts_reference(given), bound)


@pytest.mark.parametrize("sizes", CASES)
def test_biases_and_the_clamped_swiglu(sizes):
    given = make(sizes, torch.float32)
    added = biases(given)
    for part in (added, added._replace(down=None)):
        one = given._replace(act=CLAMPED_SWIGLU, biases=part)
        near(moe.fused_experts(one), moe.fused_experts_reference(one), 1e-5)


def test_strided_input():
    given = make(Sizes(5, 2, 4, 16, 8), torch.float32)
    wide = torch.randn(5, 40)
    wide[:, 3:19] = given.x
    want = moe.fused_experts_reference(given)
    near(moe.fused_experts(given._replace(x=wide[:, 3:19])), want, 3e-6)
    assert not any(one.is_contiguous() for one in strided(given)[:3])
    near(moe.fused_experts(strided(given)), want, 3e-6)


@pytest.mark.parametrize("sizes", [*CASES, Sizes(0, 2, 4, 16, 8)])
def test_the_parts_of_several_ranks_add_up(sizes):
    given, middle = make(sizes, torch.float32), sizes.experts // 2
    halves = moe.Held(0, middle, sizes.experts), moe.Held(middle, sizes.experts - middle, sizes.experts)
    sums = [moe.fused_experts(share_of(given, held)) for held in halves]
    near(sums[0] + sums[1], moe.fused_experts_reference(given), 3e-6)
    for held in shares(sizes.experts):
        own = share_of(given, held)
        near(moe.fused_experts(own), moe.fused_experts_reference(own), 3e-6)


def test_every_tiling_is_warmed_up():
    for experts, k in ((128, 8), (8, 2), (60, 4)):
        used = {moe.tiling(n * k, experts, torch.bfloat16) for n in moe.tiling_rows(experts, k)}
        assert used == set(moe.TILINGS.values())
        tiles = {quantized_experts.choose_tiles(n * k, experts) for n in moe.tiling_rows(experts, k)}
        assert tiles == {*quantized_experts.TILES.values(), 8}


@pytest.mark.parametrize(
    "experts, hidden, inner, most, outputs",
    [
        (64, 2048, 1408, 3, (128, 128)),  # DeepSeek-V2-Lite
        (128, 2048, 768, 3, (128, 128)),  # Qwen3-30B-A3B
        (8, 4096, 14336, 4, (128, 128)),  # Mixtral-8x7B
        (16, 2048, 768, 3, (64, 128)),  # few experts of a rank
        (32, 2880, 2880, 3, (128, 64)),
    ],
)
def test_items_of_few_pairs(experts, hidden, inner, most, outputs):
    w2 = torch.empty(experts, hidden, inner, device="meta", dtype=torch.bfloat16)
    assert (expert_gemm.most_pairs(w2), expert_gemm.item_outputs(w2, 132)) == (most, outputs)


@pytest.mark.parametrize(
    "rows, experts, hidden, inner, top, tiles",
    [
        (16, 64, 2048, 1408, 6, 1),  # DeepSeek-V2-Lite
        (64, 64, 2048, 1408, 6, 2),
        (64, 128, 2048, 768, 8, 1),  # Qwen3-30B-A3B
        (16, 8, 4096, 14336, 2, 1),  # Mixtral-8x7B
        (100, 64, 2048, 1408, 6, 4),
        (16, 20, 128, 192, 3, 1),
    ],
)
def test_items_of_one_launch(rows, experts, hidden, inner, top, tiles):
    """A router's blocks, of 9 KB and 1 KB for the system, fit beside it, which has as much, and its sorted pairs."""
    assert expert_mlp.choose_tiles(rows * top, experts) == tiles
    held, shared = expert_mlp.stages(hidden, inner, tiles)
    assert held >= 4 and shared + (5 << 10) + (1 << 10) + (10 << 10) <= 228 << 10
    most = expert_mlp.MOST_PAIRS * experts
    warm = {expert_mlp.choose_tiles(n * top, experts) for n in moe.tiling_rows(experts, top) if n * top <= most}
    assert warm == {1, 2, 4}


@pytest.mark.parametrize("elements, parts", [(1, 7), (600, 4), (10**6, 1)])
def test_parts_of_experts_have_each_tile_once(monkeypatch, elements, parts):
    monkeypatch.setattr(dequantized, "AT_ONCE", elements)
    groups, found = moe.group(make(Sizes(50, 3, 7, 16, 20, "few"), torch.float32).ids, 7, 4), []
    ranges = list(dequantized.ranges(7, 16, 16))
    assert len(ranges) == parts and [e for one in ranges for e in range(*one)] == list(range(7))
    for first, last in ranges:
        mine = dequantized.part_of(groups, first, last)
        assert int(mine.tile_expert.max()) < last - first and torch.equal(mine.ends, groups.ends[first : last + 1])
        assert parts > 1 or mine is groups, "nothing is launched for what is one part"
        needed = mine.tile_expert >= 0
        assert needed.tolist() == sorted(needed.tolist(), reverse=True), "kernels end at the first that is not needed"
        found += zip((mine.tile_expert + first)[needed].tolist(), mine.tile_start[needed].tolist(), strict=True)
    needed = groups.tile_expert >= 0
    assert found == list(zip(groups.tile_expert[needed].tolist(), groups.tile_start[needed].tolist(), strict=True))


def test_where_packed_experts_become_plain_is_a_border_of_tiles():
    assert dequantized.LEAST_PAIRS in moe.TILINGS


@pytest.mark.long
@pytest.mark.timeout(330)  # a process that other processes may slow down
def test_triton_kernels_in_the_interpreter():
    interpret("moe.cases")
