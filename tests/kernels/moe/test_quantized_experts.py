"""The kernel for quantised experts in packed tiles, thread by thread on a CPU."""

from typing import NamedTuple

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.moe import moe, quantized_experts
from phalanx.kernels.moe.group import group
from phalanx.kernels.moe.moe import Biases, Inputs, LocalExperts
from phalanx.kernels.quantized import packed_gemm
from phalanx.kernels.quantized.stack import Stack

from .. import cuda_model
from ..quantized.test_packed_gemm import make
from .reference import fused_experts_reference, planned


class Case(NamedTuple):
    tokens: int
    k: int
    experts: int
    hidden: int
    inner: int
    up: str
    down: str
    tiles: int
    biased: bool = False
    local_experts: LocalExperts | None = None
    warps: int = 0  # of quantized_pipeline; 0: quantized_experts


CASES = [
    Case(1, 2, 4, 256, 256, "q4_k", "q6_k", 1),
    Case(40, 2, 3, 704, 192, "int4 64 zeros", "q8_0", 4, biased=True),
    Case(20, 2, 6, 256, 64, "e4m3", "q4_1", 2, local_experts=LocalExperts(2, 3, 6)),
    Case(9, 3, 4, 512, 96, "q8_0", "q8_0", 1, biased=True),
    Case(7, 2, 3, 320, 64, "int4 64", "int4 32 zeros", 2),
    Case(90, 1, 2, 768, 704, "q4_k", "e4m3", 8),
    Case(5, 2, 4, 96, 32, "q8_0", "q8_0", 1),
    Case(40, 2, 3, 320, 192, "mxfp4", "mxfp4", 4, biased=True),
    Case(3, 2, 4, 4352, 64, "int4 64", "int4 64", 1),
    Case(20, 2, 3, 256, 256, "q5_k", "q6_k", 2, biased=True),
    Case(9, 2, 3, 256, 128, "e4m3_wide", "e4m3_wide", 1),
    Case(60, 2, 3, 512, 384, "e4m3_wide", "e4m3_wide", 4, biased=True),
    Case(40, 2, 3, 1536, 128, "e4m3_wide", "e4m3_wide", 4),
    Case(70, 1, 2, 128, 640, "e4m3_wide", "e4m3_wide", 8),
]
PIPELINED = [
    Case(12, 2, 3, 512, 256, "q4_k", "q4_k", 1, warps=2),
    Case(40, 2, 3, 704, 192, "int4 64 zeros", "q4_1", 1, biased=True, warps=3),
    Case(20, 2, 6, 256, 64, "q4_k", "q4_1", 1, local_experts=LocalExperts(2, 3, 6), warps=2),
    Case(9, 3, 4, 512, 64, "q8_0", "int4 32 zeros", 1, biased=True, warps=8),
    Case(24, 2, 3, 512, 256, "q4_k", "q4_k", 1, warps=3),
    Case(7, 2, 3, 320, 256, "int4 32 zeros", "q6_k", 1, warps=3),
    Case(30, 1, 2, 768, 64, "int4 64", "int4 64", 1, warps=4),
    Case(9, 2, 3, 512, 320, "q5_k", "q5_1", 1, biased=True, warps=3),
    Case(1, 1, 2, 128, 64, "q4_1", "q4_1", 1, warps=8),
    Case(3, 2, 6, 256, 64, "q6_k", "q4_1", 1, local_experts=LocalExperts(5, 1, 6), warps=2),
    Case(20, 2, 3, 512, 128, "e4m3_wide", "e4m3_wide", 1, biased=True, warps=3),
    Case(20, 2, 3, 320, 192, "mxfp4", "mxfp4", 1, biased=True, warps=3),
    Case(7, 2, 6, 128, 256, "e4m3_wide", "q4_1", 1, local_experts=LocalExperts(2, 3, 6), warps=2),
]


GEMVS = [
    Case(1, 4, 8, 512, 256, "q4_k", "q6_k", 1),
    Case(3, 2, 4, 320, 192, "mxfp4", "mxfp4", 1, biased=True),
    Case(2, 3, 6, 256, 64, "int4 64", "int4 32 zeros", 1, biased=True, local_experts=LocalExperts(2, 3, 6)),
    Case(1, 2, 4, 1408, 640, "q8_0", "e4m3", 1),
    Case(4, 2, 4, 384, 128, "e4m3_wide", "e4m3_wide", 1, local_experts=LocalExperts(0, 1, 4)),
    Case(1, 8, 8, 72 * 32, 32, "e4m3", "q8_0", 1),
]


def stack_of(experts: int, outputs: int, inputs: int, form: str) -> tuple[Stack, torch.Tensor]:
    made = [make(outputs, inputs, form, seed) for seed in range(experts)]
    n_tiles = -(-outputs // 16) * 16
    packed = packed_gemm.Packed(torch.cat([one.tiles for one, _ in made]), experts * n_tiles, made[0][0].layout)
    return Stack(packed, (experts, outputs, inputs)), torch.stack([weight for _, weight in made]).float()


def gemms(case: Case) -> tuple[tuple[str, int, bool], ...]:
    """Format and inputs of both, and whether it is gated."""
    return (case.up, case.hidden, True), (case.down, case.inner, False)


def pipeline(stack: Stack, warps: int) -> quantized_experts.PipelineConfig | None:
    """A pipeline of so many warps, of a format that takes it."""
    return quantized_experts.pipeline_config(stack.shape[2], stack.packed.layout, warps)


@pytest.fixture
def launched(monkeypatch, cuda_models):
    """Kernels run in the model; new tensors hold NaN. Gives what they were compiled for."""
    found = []

    def kernel(source, name, dtype, shared=0, **sizes):
        library = cuda_models.build(source, {"T": dtype, **sizes})
        found.append(sizes)

        def launch(grid, threads, *args, shared=0, cluster=1):
            assert shared <= (220 if source == "quantized_pipeline" else 160) << 10
            weights = next(one for one in args if isinstance(one, torch.Tensor) and one.dtype == torch.uint8)
            cuda_model.launch(library, grid, threads, args, weights, seed=len(found), x=args[0])

        return launch

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(quantized_experts, "device_caps", lambda _: DeviceCaps(5, "sm_90a", True, True, True))
    real = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: real(x, *a, **k).fill_(float("nan")))
    return found


def in_types(cases):
    """The cases, each with a dtype. The long ones, from the fourth on, have f16 and bf16 by turns."""
    bf16, f16 = torch.bfloat16, torch.float16
    later = [pytest.param(one, (f16, bf16)[i % 2], marks=pytest.mark.long) for i, one in enumerate(cases[3:])]
    return [*((one, bf16) for one in cases[:3]), *later]


class Given(NamedTuple):
    """Inputs of a case; scaled so that outputs are about 1."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: Stack
    w2: Stack
    biases: Biases
    want: torch.Tensor


def given_of(case: Case, dtype: torch.dtype) -> Given:
    torch.manual_seed(0)
    local_experts = case.local_experts or LocalExperts(0, case.experts, case.experts)
    w13, up = stack_of(local_experts.size, 2 * case.inner, case.hidden, case.up)
    w2, down = stack_of(local_experts.size, case.hidden, case.inner, case.down)
    up_scale, down_scale = (1 / (one.std() * one.shape[2] ** 0.5) for one in (up, down))
    x = (torch.randn(case.tokens, case.hidden) * up_scale).to(dtype)
    ids = torch.stack([torch.randperm(case.experts)[: case.k] for _ in range(case.tokens)]).int()
    weights = torch.rand(case.tokens, case.k) * down_scale
    biases = Biases(*(torch.randn(one.shape[:2]).to(dtype) if case.biased else None for one in (up, down)))
    wide = Biases(*(None if one is None else one.float() for one in biases))
    want = fused_experts_reference(Inputs(x.float(), ids, weights, up, down, "silu", wide, local_experts))
    return Given(x, ids, weights, w13, w2, biases, want)


def check(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape and got.isfinite().all()
    assert ((got - want).norm() / want.norm()).item() < (6e-3 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case, dtype", in_types(CASES) + in_types(PIPELINED), ids=str)
def test_experts(launched, case, dtype):
    """Hidden sizes that n-tiles do not divide, one tile and several of an expert, one chunk of x and several."""
    x, ids, weights, w13, w2, biases, want = given_of(case, dtype)
    local_experts = case.local_experts or LocalExperts(0, case.experts, case.experts)
    groups = group(ids, local_experts.size, 8 * case.tiles, local_experts)
    configs = quantized_experts.tiled(case.tiles, w13, w2)
    if case.warps:
        few = [pipeline(one, case.warps) for one in (w13, w2)]
        configs = quantized_experts.Configs(few[0] or configs.up, few[1] or configs.down)
    h = quantized_experts.up(x, weights, w13, groups, case.k, "silu", configs.up, biases.up)
    y = quantized_experts.down(h, weights, w2, groups, configs.down, biases.down)
    here = (ids >= local_experts.first) & (ids < local_experts.first + local_experts.size)
    got = torch.where(here.unsqueeze(2), y.view(case.tokens, case.k, case.hidden).float(), 0).sum(1)
    assert len(launched) == 2
    check(got, want, dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case, dtype", in_types(GEMVS), ids=str)
def test_experts_of_few_routed_tokens(launched, case, dtype):
    """N-tiles of more packed tiles than warps, of fewer, and of a number that warps do not divide."""
    x, ids, weights, w13, w2, biases, want = given_of(case, dtype)
    got = quantized_experts.gemv(Inputs(x, ids, weights, w13, w2, "silu", biases, case.local_experts))
    assert len(launched) == 2
    check(got.float(), want, dtype)


@pytest.mark.parametrize(
    "form, inner, routed, experts, taken",
    [
        ("int4 64", 768, 16, 128, True), ("int4 64", 768, 24, 128, False), ("int4 64", 768, 16, 24, False),
        ("mxfp4", 768, 4, 32, True), ("mxfp4", 768, 8, 32, False), ("q4_k", 768, 8, 128, False),
        ("int4 64", 14336, 8, 128, False),  # rows of eight experts do not fit in shared memory
    ],
)  # fmt: skip
def test_when_routed_tokens_are_few(form, inner, routed, experts, taken):
    w13, w2 = (Stack(make(16, 512, form)[0], (experts, *shape)) for shape in ((2 * inner, 2048), (2048, inner)))
    assert (planned(routed, experts, w13, w2, GPUS[0], 8) == "GEMVs") is taken


@pytest.mark.parametrize("form", ["q4_k", "int4 64", "e4m3", "e4m3_wide"])
def test_some_cases_have_several_chunks(form):
    inputs = [(one.tiles, n, gated) for one in CASES for of, n, gated in gemms(one) if of == form]
    layout = make(16, 512, form)[0].layout
    assert any(quantized_experts.tile_config(tiles, n, layout, gated).inputs < n for tiles, n, gated in inputs)


@pytest.mark.parametrize("size", [2500, 3e-4])
def test_sums_of_f16(launched, size):
    """Sums of 32 inputs, by which the pipeline takes off minima: some are more than an f16 holds; small ones are
    exact."""
    torch.manual_seed(0)
    w2, down = stack_of(2, 64, 256, "q4_k")
    x = (size * torch.randn(6, 256).abs()).half()
    assert size < 1 or x.float().unflatten(1, (8, 32)).sum(2).max() > 65504
    ids = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.int32).view(6, 1)
    groups, config = group(ids, 2, 8), pipeline(w2, 2)
    assert config is not None
    y = quantized_experts.down(x, torch.ones(6, 1), w2, groups, config)
    routed = groups.sorted_ids.long()
    want = (down[ids.flatten().long()[routed]] @ x.float().unsqueeze(2)).squeeze(2)
    assert ((y[routed].float() - want).norm() / want.norm()).item() < 5e-4


@pytest.mark.parametrize("form", ["q8_0", "int4 64", "q6_k"])
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_cuts_are_what_the_kernel_takes(form, tiles):
    """Cuts of all inputs that packed tiles can have: whole chunks, whole packed tiles for each warp, and room in shared
    memory."""
    layout = make(16, 512, form)[0].layout
    for inputs in range(layout.inputs, 16384, layout.inputs):
        for gated in (False, True):
            config = quantized_experts.tile_config(tiles, inputs, layout, gated)
            steps = config.inputs / layout.inputs / config.groups
            assert inputs % config.inputs == 0 and steps == int(steps) > 0 and config.groups * tiles <= 8
            assert config.inputs == inputs or int(steps) % config.ahead == 0
            assert config.shared(inputs, gated) <= 99 << 10  # two blocks share a multiprocessor of sm_90


@pytest.mark.parametrize(
    "tokens, up, down, found",
    [
        (1, "q4_k", "q6_k", (8, "pipeline", "pipeline")), (64, "int4 64", "q6_k", (8, "pipeline", "pipeline")),
        (128, "q4_k", "q8_0", (8, "pipeline", "tiles")), (16, "e4m3", "q4_1", (8, "tiles", "pipeline")),
        (64, "e4m3", "e4m3", (8, "tiles", "tiles")),
        (64, "e4m3_wide", "e4m3_wide", (8, "pipeline", "pipeline")), (128, "q8_0", "q8_0", (16, "tiles", "tiles")),
        (129, "q4_k", "q4_k", (32, "tiles", "tiles")), (64, "mxfp4", "mxfp4", (8, "pipeline", "pipeline")),
    ],
)  # fmt: skip
def test_chosen_kernels(tokens, up, down, found):
    """Kernels of Qwen3-30B-A3B; of more than 6 routed tokens per expert not on Hopper, which has others."""
    w13, w2 = (
        Stack(make(16, 512, form)[0], (128, *shape)) for form, shape in ((up, (1536, 2048)), (down, (2048, 768)))
    )
    few = 8 * tokens <= 6 * 128
    for has_tma, hopper in [(True, False), (False, False), *([(True, True)] if few else [])]:
        caps = DeviceCaps(132, "sm_90a" if hopper else "sm_100", True, has_tma, hopper)
        configs = planned(8 * tokens, 128, w13, w2, caps)
        kinds = ["tiles" if isinstance(one, quantized_experts.ExpertTileConfig) else "pipeline" for one in configs]
        assert configs.up.rows == configs.down.rows
        if has_tma:
            assert (configs.rows, *kinds) == found
        else:
            assert kinds == ["tiles", "tiles"]


def test_few_units_leave_the_pipeline():
    """One token of a quarter of Qwen3-30B-A3B's experts: most warps would be idle."""
    w13, w2 = (Stack(make(16, 512, "q4_k")[0], (128, *shape)) for shape in ((384, 2048), (2048, 192)))
    configs = planned(8, 128, w13, w2, DeviceCaps(132, "sm_90a", True, True, True))
    assert isinstance(configs.up, quantized_experts.ExpertTileConfig)


def test_long_rows_leave_room_for_fewer_rings():
    """Rows as DeepSeek-V3 has them."""
    packed = make(16, 512, "e4m3_wide")[0]
    found = [quantized_experts.choose_pipeline(Stack(packed, (256, 4096, n))) for n in (2048, 7168)]
    assert [one and one.warps for one in found] == [15, 12]


GPUS = [
    DeviceCaps(132, "sm_90a", True, True, True),
    DeviceCaps(148, "sm_100", True, True, False),
    DeviceCaps(108, "sm_80", False, False, False),
]


SHAPES = [(128, 8, 2048, 768), (8, 2, 4096, 14336)]
WARMED = [(*shape, up, down) for shape in SHAPES for up, down in (("int4 64", "int4 64"), ("q4_k", "q6_k"))]
WARMED += [(32, 4, 2880, 2880, form, form) for form in ("mxfp4", "q8_0")]


@pytest.mark.parametrize("found", GPUS, ids=lambda one: one.arch)
@pytest.mark.parametrize("experts, k, hidden, inner, up, down", WARMED)
def test_all_kernels_are_warmed_up(experts, k, hidden, inner, up, down, found):
    """Every kernel that a number of tokens asks for: one of those at the start has asked for it."""
    w13, w2 = (
        Stack(make(16, 512, form)[0], (experts, *shape))
        for form, shape in ((up, (2 * inner, hidden)), (down, (hidden, inner)))
    )

    def kernels_of(tokens):
        return planned(tokens * k, experts, w13, w2, found, k)

    started = {kernels_of(tokens) for tokens in moe.warm_up_rows(experts, k)}
    for tokens in range(1, 110 * experts // k):
        assert kernels_of(tokens) in started, tokens
