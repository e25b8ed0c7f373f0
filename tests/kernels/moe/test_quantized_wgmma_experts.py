"""Quantised experts by asynchronous tensor cores: for which it is, and the kernel thread by thread on a CPU."""

from typing import NamedTuple

import pytest
import torch
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.moe import quantized_experts
from phalanx.kernels.moe.moe import Biases, Inputs, LocalExperts
from phalanx.kernels.moe.quantized_experts import WgmmaExpertsConfig
from phalanx.kernels.quantized.stack import Stack

from ..quantized.test_packed_gemm import make as weight_of
from .conftest import HOPPER
from .reference import fused_experts_reference, planned
from .test_quantized_experts import in_types, stack_of


class Case(NamedTuple):
    tokens: int
    k: int
    experts: int
    hidden: int
    inner: int
    up: str
    down: str
    tile: tuple[int, int]  # pairs and outputs
    chunks: tuple[int, int] = (64, 64)  # inputs of each, of both GEMMs
    biased: bool = False
    local_experts: LocalExperts | None = None
    one: bool = False  # whether all tokens choose the same experts


CASES = [
    Case(20, 2, 3, 128, 192, "mxfp4", "mxfp4", (16, 256), biased=True),
    Case(30, 2, 3, 128, 64, "int4 64", "int4 32 zeros", (32, 256)),
    Case(20, 2, 6, 256, 64, "q4_k", "q8_0", (16, 256), (256, 64), local_experts=LocalExperts(2, 3, 6)),
    Case(90, 2, 3, 256, 320, "q4_k", "q8_0", (48, 256), (128, 64), biased=True),
    Case(70, 2, 3, 320, 256, "int4 64 zeros", "q6_k", (64, 256), (320, 128), biased=True),
    Case(1, 2, 4, 64, 64, "q8_0", "q8_0", (32, 256)),  # fewer pairs than a tile has
    Case(150, 1, 2, 512, 256, "q4_k", "mxfp4", (128, 256), (256, 128), one=True),
    Case(300, 1, 1, 64, 64, "q4_1", "int4 64", (16, 256)),  # more tiles than a band has
    Case(100, 2, 6, 192, 448, "e4m3", "e4m3", (96, 256), (192, 64), local_experts=LocalExperts(5, 1, 6)),
    Case(40, 3, 4, 768, 256, "mxfp4", "q6_k", (16, 256), (192, 128), biased=True, local_experts=LocalExperts(1, 2, 4)),
    Case(60, 2, 3, 256, 256, "q6_k", "q5_k", (32, 384), (128, 256)),
]


@pytest.mark.parametrize("case, dtype", in_types(CASES), ids=str)
def test_experts(on_hopper, case, dtype):
    """Blocks have several items, the ring goes round, and tiles are not whole."""
    torch.manual_seed(0)
    local_experts = case.local_experts or LocalExperts(0, case.experts, case.experts)
    w13, up = stack_of(local_experts.size, 2 * case.inner, case.hidden, case.up)
    w2, down = stack_of(local_experts.size, case.hidden, case.inner, case.down)
    up_scale, down_scale = (1 / (one.std() * one.shape[2] ** 0.5) for one in (up, down))
    x = (torch.randn(case.tokens, case.hidden) * up_scale).to(dtype)
    ids = torch.stack([torch.randperm(case.experts)[: case.k] for _ in range(case.tokens)]).int()
    ids = ids[:1].expand_as(ids).contiguous() if case.one else ids
    weights = torch.rand(case.tokens, case.k) * down_scale
    biases = Biases(*(torch.randn(one.shape[:2]).to(dtype) if case.biased else None for one in (up, down)))
    configs = [WgmmaExpertsConfig(*case.tile, chunk) for chunk in case.chunks]
    given = Inputs(x, ids, weights, w13, w2, "silu", biases, local_experts)
    y = quantized_experts.experts(given, quantized_experts.Configs(*configs)).float()
    here = (ids >= local_experts.first) & (ids < local_experts.first + local_experts.size)
    assert y[~here.flatten()].isnan().all()  # what is of no pair stays as it is
    got = torch.where(here.unsqueeze(2), y.view(case.tokens, case.k, case.hidden), 0).sum(1)
    wide = Biases(*(None if one is None else one.float() for one in biases))
    want = fused_experts_reference(Inputs(x.float(), ids, weights, up, down, "silu", wide, local_experts))
    assert got.isfinite().all()
    assert ((got - want).norm() / want.norm()).item() < (6e-3 if dtype == torch.bfloat16 else 2e-3)


def stacks(up, down, hidden=2048, inner=768):
    """Stacks of Qwen3-30B-A3B, unless said otherwise, without its weights."""
    return [
        Stack(weight_of(16, 512, form)[0], (128, *shape))
        for form, shape in ((up, (2 * inner, hidden)), (down, (hidden, inner)))
    ]


def test_what_it_is_for():
    def kernels_of(routed, up="q4_k", down="q6_k", caps=HOPPER, **sizes):
        return planned(routed * 128, 128, *stacks(up, down, **sizes), caps)

    for up, down in (("q4_k", "q6_k"), ("int4 64", "int4 32 zeros"), ("mxfp4", "mxfp4"), ("q8_0", "e4m3")):
        for routed in (7, 16, 24, 32, 64, 96):
            found = kernels_of(routed, up, down)
            assert all(isinstance(one, WgmmaExpertsConfig) and one.rows == found.rows >= routed for one in found)
        assert not isinstance(kernels_of(6, up, down).up, WgmmaExpertsConfig)
    tiles = kernels_of(16, "q8_0", "q8_0", inner=1440)  # which 64 does not divide
    blackwell = DeviceCaps(148, "sm_100", True, True, False)
    for found in (tiles, kernels_of(16, caps=blackwell), kernels_of(16, down="e4m3_wide")):
        assert all(isinstance(one, quantized_experts.ExpertTileConfig) for one in found)


def test_cuts_are_what_the_kernel_takes():
    """Whole chunks of whole packed tiles and of whole boxes, and room for several of them."""
    tiles = {(rows, quantized_experts.OUTPUTS) for rows in quantized_experts.WGMMA_TILES.values()}
    tiles |= {(rows, quantized_experts.MORE_OUTPUTS) for rows in (16, quantized_experts.MAX_ROWS_OF_MORE)}
    for form in ("q8_0", "q4_k", "q6_k", "int4 32 zeros", "mxfp4", "e4m3"):
        for inputs in (64, 768, 2048, 2880, 4096, 7168, 14336):
            stack = stacks(form, form, inputs)[0]
            for rows, outputs in tiles:
                config = quantized_experts.wgmma_config(rows, outputs, stack)
                assert inputs % config.inputs == config.inputs % 64 == config.inputs % stack.packed.layout.inputs == 0
                count, shared = config.stages(stack.packed.layout)
                assert count >= quantized_experts.LEAST_STAGES and shared + 16 * count <= 227 << 10


@pytest.mark.parametrize(
    "experts, hidden, inner, rows, outputs",
    [
        (128, 2048, 768, 16, (384, 256)),  # four waves, not six; of down six, where eight make as many and a third more
        (32, 2880, 2880, 32, (384, 384)),
        (128, 2048, 768, 48, (256, 256)),
    ],
)
def test_outputs_of_a_tile(experts, hidden, inner, rows, outputs):
    shapes = (2 * inner, hidden), (hidden, inner)
    w13, w2 = (Stack(weight_of(16, 512, "mxfp4")[0], (experts, *shape)) for shape in shapes)
    routed = next(most for most, tile in quantized_experts.WGMMA_TILES.items() if tile == rows) * experts
    found = quantized_experts.choose_wgmma(routed, experts, w13, w2, HOPPER)
    assert tuple(one.outputs for one in found) == outputs and {one.rows for one in found} == {rows}
