"""Quantised experts on a GPU beside f64 of their dequantised weights, with NaN in all that must not be left."""

import functools
import math
import subprocess
import sys

import pytest
import torch
from phalanx.kernels.activation.activation import CLAMPED_SWIGLU, gated_activation_reference
from phalanx.kernels.device import device_caps
from phalanx.kernels.moe import moe, plain_experts, quantized_experts
from phalanx.kernels.moe.moe import Biases, LocalExperts
from phalanx.kernels.quantized import affine, cuda_layouts, e4m3, e4m3_wgmma, mxfp4
from phalanx.kernels.quantized.stack import Stack, stack

from ...devices import needs_hopper, needs_tma, require_gpu
from ..gpu import poison  # noqa: F401
from ..quantized import codecs
from ..quantized.floats_cases import rounded
from .cases import Sizes, make, shares, summed
from .reference import by_plain_kernels, fused_experts_reference, planned

require_gpu()
CAPS = device_caps(torch.device("cuda"))
KINDS = [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)]  # of the error's norm beside the output's
QWEN = Sizes(1, 8, 24, 2048, 768)  # but for its count of experts
FORMS = [
    ("q8_0", "q8_0"), ("q4_k", "q6_k"), ("q4_0", "q8_0"), ("q5_k", "q5_0"), ("e4m3", "e4m3"), ("int4", "int4 zeros"),
    ("e4m3 narrow", "e4m3 narrow"), ("mxfp4", "mxfp4"),
]  # fmt: skip
PIPELINED = [
    ("q4_k", "q6_k"), ("q4_0", "q4_1"), ("q5_k", "q5_1"), ("int4", "int4 zeros"), ("e4m3", "e4m3"), ("mxfp4", "mxfp4"),
]  # fmt: skip
WGMMA = [one for one in FORMS if one != ("e4m3", "e4m3")]
TILES = [(16, 384), (16, 256), (32, 384), (48, 256), (64, 256), (96, 256), (128, 256)]  # pairs and outputs


def quantised(weight, form):
    """A stack of weights [E, O, I] in a format."""
    weight = weight.nan_to_num(0)
    if form.startswith("int4"):
        experts, outputs, inputs = weight.shape
        codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8, device="cuda")
        scales = (torch.rand(experts, outputs, inputs // 64, device="cuda") * inputs**-0.5 / 4).half().float()
        zeros = torch.full(scales.shape, 8, dtype=torch.int16, device="cuda")
        if "zeros" in form:
            zeros[1:] = torch.randint(0, 16, zeros[1:].shape, dtype=torch.int16, device="cuda")  # not the first one's
        return stack(affine, lambda e: (codes[e], scales[e], zeros[e]), weight.shape)
    if form == "mxfp4":
        (*sizes, inputs), middle = weight.shape, 127 - round(math.log2(3 * weight.shape[2] ** 0.5))  # outputs of 1
        codes = torch.randint(0, 256, (*sizes, inputs // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(middle - 2, middle + 2, (*sizes, inputs // 32), dtype=torch.uint8, device="cuda")
        made = mxfp4.experts(codes, scales, inputs, torch.bfloat16)
        assert isinstance(made, Stack)
        return made
    if form == "e4m3 narrow":  # with a scale for each 64 inputs, and so in packed tiles of 32
        made = stack(e4m3, lambda e: e4m3.encode_reference(weight[e], 64), weight.shape)
        assert made.packed.layout == cuda_layouts.E4M3
        return made
    codec = codecs.find(form)
    return stack(codec, lambda e: codec.encode(weight[e]), weight.shape)


@functools.cache
def weights_of(experts, hidden, inner, up, down):
    w13 = torch.randn(experts, 2 * inner, hidden, device="cuda") * hidden**-0.5
    w2 = torch.randn(experts, hidden, inner, device="cuda") * inner**-0.5
    return quantised(w13, up), quantised(w2, down)


def reference(given, eight=False):
    """Expert by expert, in f64. eight: rows become e4m3, too."""
    x, ids, weights, w13, w2, act, biases, local_experts, _ = given
    y = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for e in range(w13.shape[0]):
        rows, place = (ids == e + (local_experts.first if local_experts else 0)).nonzero(as_tuple=True)
        if not len(rows):
            continue
        up, down = (one.expert(e, torch.float32).double() for one in (w13, w2))
        of_up, of_down = (0 if one is None else one[e].double() for one in biases)
        mine = rounded(x[rows]) if eight else x[rows].double()
        inner = gated_activation_reference((mine @ up.T + of_up).float(), act).double()
        inner = rounded(inner) if eight else inner
        y.index_add_(0, rows, (inner @ down.T + of_down) * weights[rows, place].double().unsqueeze(1))
    return y


def check(
    sizes, up, down, dtype, bound, act="silu", biased=False, local_experts=None, tiles=0, pipeline=False, tile=None,
    plain=False, few=False,
):  # fmt: skip
    """tiles: of quantized_experts.cu, for both GEMMs. pipeline: both by quantized_pipeline.cu. tile: pairs and
    outputs, of quantized_wgmma_experts.cu. plain: dequantised. few: by quantized_expert_gemv.cu."""
    given = make(sizes._replace(inner=1), torch.float32, "cuda")
    w13, w2 = weights_of(
        sizes.experts if local_experts is None else local_experts.size, sizes.hidden, sizes.inner, up, down
    )
    x = given.x.to(dtype)
    assert quantized_experts.takes(x, w13, w2)
    biases = Biases(*(torch.randn(one.shape[:2], device="cuda").to(dtype) if biased else None for one in (w13, w2)))
    given = moe.Inputs(x, given.ids, given.weights, w13, w2, act, biases, local_experts)
    call, chosen = moe.fused_experts, planned(given.routed, given.experts, w13, w2, CAPS)
    eight = isinstance(getattr(chosen, "up", None), e4m3_wgmma.E4m3Config)
    eight = eight and not (tiles or pipeline or tile or plain or few)
    if eight:  # of what the first GEMM makes some is rounded another way, and then off by a sixteenth to an eighth
        bound = max(bound, 3e-2)
    if tile and dtype == torch.bfloat16:  # scales and minima are rounded, too
        bound = max(bound, 1.5e-2)
    if few:
        call = quantized_experts.gemv
    if plain:
        call = lambda one: summed(by_plain_kernels(one, CAPS), one)  # noqa: E731
    if tiles or pipeline or tile:
        configs = quantized_experts.tiled(tiles or 1, w13, w2)
        if tile:
            configs = quantized_experts.Configs(*(quantized_experts.wgmma_config(*tile, one) for one in (w13, w2)))
        if pipeline:
            configs = quantized_experts.Configs(*(quantized_experts.choose_pipeline(one) for one in (w13, w2)))
            assert all(configs)  # a format that takes no pipeline
        call = lambda one: summed(quantized_experts.experts(one, configs), one)  # noqa: E731
    got, want = [call(given) for _ in range(2)], reference(given, eight)
    assert got[0].shape == want.shape and got[0].isfinite().all()
    assert (got[0].double() - want).norm() <= bound * want.norm()
    assert torch.equal(*got)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("up, down", FORMS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 40, 200])
def test_experts(tokens, up, down, dtype, bound):
    check(QWEN._replace(tokens=tokens), up, down, dtype, bound)


@pytest.mark.parametrize("local_experts", [None, LocalExperts(3, 12, 24)], ids=str)
@pytest.mark.parametrize("elements", [1 << 27, 5 * 1536 * 2048])
@pytest.mark.parametrize("up, down", FORMS)
def test_experts_of_many_routed_tokens_become_plain(monkeypatch, up, down, elements, local_experts):
    monkeypatch.setattr(plain_experts, "AT_ONCE", elements)
    check(
        QWEN._replace(tokens=400), up, down, torch.bfloat16, 1e-2, biased=local_experts is None,
        local_experts=local_experts, plain=True,
    )  # fmt: skip


@pytest.mark.parametrize("spread", ["any", "few", "one"])
@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "up, down", [("q4_k", "q6_k"), ("q8_0", "q8_0"), ("e4m3 narrow", "e4m3 narrow"), ("e4m3", "e4m3")]
)
def test_tiles(up, down, tiles, spread):
    for tokens in (1, 9, 100):
        check(Sizes(tokens, 4, 20, 512, 256, spread), up, down, torch.bfloat16, 1e-2, tiles=tiles)


def offsets(*words):
    """Warps that wait for each other do so in another process first, as what never ends would end no test."""
    command = [sys.executable, "-m", "phalanx.tests.kernels.moe.test_quantized_experts_gpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def pipelines_end():
    offsets()


@pytest.fixture(scope="module")
def wgmma_ends():
    offsets("wgmma")


def main(wgmma):
    for tokens in (1, 40):
        for up, down in WGMMA if wgmma else PIPELINED:
            for spread in ("any", "one"):
                how = dict(tile=(16, 256)) if wgmma else dict(pipeline=True)
                check(Sizes(tokens, 4, 20, 512, 256, spread), up, down, torch.bfloat16, 1e-2, **how)


@needs_tma
@pytest.mark.parametrize("spread", ["any", "few", "one"])
@pytest.mark.parametrize("up, down", PIPELINED)
def test_pipelines(pipelines_end, up, down, spread):
    for tokens in (1, 9, 100):
        check(Sizes(tokens, 4, 20, 512, 256, spread), up, down, torch.bfloat16, 1e-2, pipeline=True)


@needs_tma
@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("up, down", PIPELINED)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_pipelines_of_qwen(pipelines_end, tokens, up, down, dtype, bound):
    check(QWEN._replace(tokens=tokens), up, down, dtype, bound, pipeline=True)


@needs_tma
@pytest.mark.parametrize("hidden, inner", [(192, 64), (2880, 2880), (4096, 384)])
def test_pipelines_of_other_sizes(pipelines_end, hidden, inner):
    """N-tiles that pairs do not divide, short n-tiles, and biases."""
    for tokens in (1, 7, 20):
        check(Sizes(tokens, 2, 4, hidden, inner), "q4_0", "q4_1", torch.bfloat16, 1e-2, biased=True, pipeline=True)


@needs_hopper
@pytest.mark.parametrize("spread", ["any", "few", "one"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("up, down", WGMMA)
def test_wgmma(wgmma_ends, up, down, tile, spread):
    for tokens in (1, 50, 300):
        check(Sizes(tokens, 4, 20, 512, 256, spread), up, down, torch.bfloat16, 1e-2, tile=tile)


@needs_hopper
@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("up, down", WGMMA)
@pytest.mark.parametrize("tokens, tile", [(30, (16, 256)), (60, (32, 256)), (120, (64, 256)), (270, (128, 256))])
def test_wgmma_of_qwen(wgmma_ends, tokens, tile, up, down, dtype, bound):
    """10, 20, 40 and 90 pairs an expert."""
    check(QWEN._replace(tokens=tokens), up, down, dtype, bound, tile=tile)


@needs_hopper
@pytest.mark.parametrize("up, down", [("mxfp4", "mxfp4"), ("int4 zeros", "q8_0")])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_wgmma_of_gpt_oss(wgmma_ends, tile, up, down):
    """Tiles of outputs that are not whole."""
    for tokens in (20, 40, 80, 180):
        sizes = Sizes(tokens, 4, 8, 2880, 2880)
        check(sizes, up, down, torch.bfloat16, 1.5e-2, CLAMPED_SWIGLU, biased=True, tile=tile)


@needs_hopper
@pytest.mark.parametrize("hidden, inner", [(192, 64), (1024, 4352), (4096, 1408)])
def test_wgmma_of_other_sizes(wgmma_ends, hidden, inner):
    for tokens in (7, 60):
        check(Sizes(tokens, 2, 4, hidden, inner), "q8_0", "int4 zeros", torch.float16, 2e-3, tile=(32, 384))


@needs_hopper
@pytest.mark.parametrize("local_experts", shares(12), ids=str)
def test_wgmma_leaves_experts_of_other_ranks_out(wgmma_ends, local_experts):
    for tokens in (1, 90):
        check(
            Sizes(tokens, 3, 12, 512, 256), "q4_k", "q8_0", torch.bfloat16, 1e-2, biased=True,
            local_experts=LocalExperts(*local_experts), tile=(32, 256),
        )  # fmt: skip


@pytest.mark.parametrize("hidden, inner", [(96, 32), (4352, 64), (2880, 2880), (4096, 14336)])
def test_sizes(hidden, inner):
    """Inputs that few chunks divide, and those of Mixtral and gpt-oss."""
    for tokens in (1, 7, 60):
        check(Sizes(tokens, 2, 4, hidden, inner), "q8_0", "q8_0", torch.bfloat16, 1e-2)


@pytest.mark.parametrize("act", ["gelu_tanh", CLAMPED_SWIGLU])
def test_biases_and_activations(act):
    for tokens in (1, 50):
        check(Sizes(tokens, 4, 8, 512, 256), "q4_0", "q8_0", torch.bfloat16, 1.5e-2, act, biased=True)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("up, down", FORMS)
def test_experts_of_few_routed_tokens(up, down, dtype, bound):
    """With biases, and where a rank has some of the experts, and none of the chosen ones."""
    for tokens, k, hidden, inner in ((1, 8, 2048, 768), (5, 3, 512, 256), (2, 4, 2816, 1280)):
        act = CLAMPED_SWIGLU if k == 4 else "silu"
        for local_experts in (None, *shares(40)):
            check(
                Sizes(tokens, k, 40, hidden, inner), up, down, dtype, bound, act, biased=True,
                local_experts=local_experts, few=True,
            )  # fmt: skip


def test_experts_of_gpt_oss():
    for tokens in (1, 16, 100, 1000):
        check(Sizes(tokens, 4, 8, 2880, 2880), "mxfp4", "mxfp4", torch.bfloat16, 1.5e-2, CLAMPED_SWIGLU, biased=True)


@pytest.mark.parametrize("local_experts", shares(12), ids=str)
def test_experts_of_other_ranks_are_left_out(local_experts):
    for tokens in (1, 30):
        check(
            Sizes(tokens, 3, 12, 512, 256), "q4_k", "q8_0", torch.bfloat16, 1e-2,
            local_experts=LocalExperts(*local_experts),
        )  # fmt: skip


def test_stacks_that_no_kernel_takes_are_dequantised():
    """Half a packed tile of inputs."""
    given = make(Sizes(5, 2, 4, 96, 48), torch.bfloat16, "cuda")
    w13, w2 = quantised(given.w13, "q4_0"), given.w2.nan_to_num(0)
    given = given._replace(w13=w13, w2=w2)
    got, want = moe.fused_experts(given), fused_experts_reference(given)
    torch.testing.assert_close(got, want, atol=4e-2, rtol=4e-2)


def test_a_graph_of_other_choices():
    """A captured graph holds for whatever the router chooses."""
    w13, w2 = weights_of(24, 2048, 768, "q4_k", "q6_k")
    given = make(QWEN._replace(tokens=4, inner=1), torch.bfloat16, "cuda")._replace(w13=w13, w2=w2)
    moe.fused_experts(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe.fused_experts(given)
    for seed in range(3):
        torch.manual_seed(seed)
        other = make(QWEN._replace(tokens=4, inner=1), torch.bfloat16, "cuda")
        for to, one in zip(given[:3], other[:3], strict=True):
            to.copy_(one)
        graph.replay()
        assert torch.equal(y, moe.fused_experts(given))


if __name__ == "__main__":
    main("wgmma" in sys.argv)
