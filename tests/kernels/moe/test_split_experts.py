"""Experts of which the CPU computes some units and a GPU the others: both parts make what the whole makes."""

import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe import split_experts
from phalanx.kernels.moe.host_choice import Costs
from phalanx.kernels.moe.host_experts import Experts, HostPairs, host_biases
from phalanx.kernels.moe.moe import Biases, Held, Inputs, fused_experts_reference, matrix
from phalanx.kernels.quantized import affine, e4m3, gpu_form, mxfp4, pieces_cuda, q4_0, q4_k, q5_1, q6_k, q8_0
from phalanx.kernels.quantized.stack import stack

from ..conftest import TILES

EXPERTS, HIDDEN, INNER = 4, 256, 768


def coded(codec):
    def made(weights):
        return stack(codec, lambda expert: codec.encode(weights[expert]), weights.shape)

    return made


def int4(group, middle):
    def made(weights):
        codes = torch.randint(0, 16, weights.shape, dtype=torch.uint8)
        scales = torch.rand(*weights.shape[:2], weights.shape[2] // group).half().float() / 64
        zeros = torch.randint(8 if middle else 0, 9 if middle else 17, scales.shape).short()
        return stack(affine, lambda expert: (codes[expert], scales[expert], zeros[expert]), codes.shape)

    return made


def mxfp4_of(weights):
    experts, outputs, inputs = weights.shape
    codes = torch.randint(0, 255, (experts, outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    return stack(mxfp4, lambda expert: (codes[expert], scales[expert]), weights.shape)


FORMS = {  # of w13 and w2, and units that stay together; super-blocks and groups are cut, too
    "q4_k": (coded(q4_k), coded(q6_k), 64), "q4_0": (coded(q4_0), coded(q5_1), 64),
    "q8_0": (coded(q8_0), coded(q8_0), 64), "e4m3": (coded(e4m3), coded(e4m3), 256),
    "int4": (int4(64, True), int4(128, True), 64), "zeros": (int4(32, False), int4(32, False), 64),
    "mxfp4": (mxfp4_of, mxfp4_of, 64), "bf16": (torch.Tensor.bfloat16, torch.Tensor.bfloat16, 64),
    "f16": (torch.Tensor.half, torch.Tensor.half, 64),
}  # fmt: skip
DTYPES = {form: (torch.bfloat16, torch.float16) for form in FORMS}  # of x
DTYPES |= {"bf16": (torch.bfloat16,), "f16": (torch.float16,)}
CASES = [(form, dtype) for form, dtypes in DTYPES.items() for dtype in dtypes]
needs_compiler = pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")


def first_of(form):
    """The GPU's first unit: not a super-block's, where it need not be."""
    return 576 if FORMS[form][2] == 64 else 512


def experts_of(form):
    torch.manual_seed(0)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    up, down, _ = FORMS[form]
    return Experts(*(make(torch.randn(shape) / 16) for make, shape in zip((up, down), shapes, strict=True)))


def of_gpu(whole, first):
    return split_experts.last_units(Experts(*map(gpu_form.of_gpu, whole)), first)


def plain(one):
    return torch.stack([matrix(one, e, torch.float32) for e in range(one.shape[0])])


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_a_cut_has_the_weights_of_the_last_units(form):
    whole, first = experts_of(form), first_of(form)
    for dtype in (torch.bfloat16, torch.float16):
        assert split_experts.unit(whole, dtype) == (FORMS[form][2] if dtype in DTYPES[form] else 0)
    w13, w2 = (plain(one) for one in whole)
    want = w13.unflatten(1, (2, -1))[:, :, first:].flatten(1, 2), w2[:, :, first:]
    for one, same in zip(of_gpu(whole, first), want, strict=True):
        assert one.shape == same.shape and torch.equal(plain(one), same)
        assert isinstance(one, torch.Tensor) or isinstance(one.packed, pieces_cuda.Packed)


@needs_compiler
def test_outputs_that_blocks_do_not_divide():
    whole = Experts(*(coded(q8_0)(torch.randn(shape)) for shape in ((2, 256, 96), (2, 40, 128))))
    part = of_gpu(whole, 64)
    assert part.w2.shape == (2, 40, 64)
    assert torch.equal(plain(part.w2), plain(whole.w2)[:, :, 64:])


@needs_compiler
def test_what_cannot_be_cut():
    codes, scales = torch.randint(0, 120, (2, 64, 192), dtype=torch.uint8), torch.rand(2, 64, 1)
    of_rows = stack(e4m3, lambda expert: (codes[expert], scales[expert]), codes.shape)
    rows = stack(q8_0, lambda expert: q8_0.encode(torch.randn(384, 64)), (2, 384, 64))
    wide = torch.randn(2, 384, 64), torch.randn(2, 64, 192)
    small = torch.randn(2, 80, 64).bfloat16(), torch.randn(2, 64, 40).bfloat16()
    for w13, w2 in ((rows, of_rows), (rows, wide[1].bfloat16()), wide, small):  # one scale a row, mixed, f32, 40 units
        unit = split_experts.unit(Experts(w13, w2), torch.bfloat16)
        assert unit in (0, w2.shape[2])


def halves(case, units):
    """What the CPU makes of the first units, in f32, and the inputs of who has the others."""
    x, ids, weights, w13, w2, act, biases, held = case
    first = held.first
    pairs = HostPairs(x, ids, weights, act, host_biases(split_experts.biases_of(biases, 0, units)), first)
    at, out = torch.arange(EXPERTS), torch.empty(x.shape)
    ops.run(*pairs.all_calls(Experts(w13, w2), at, out, units).calls)
    part = of_gpu(Experts(w13, w2), units)
    rest = split_experts.biases_of(biases, units, w2.shape[2])
    return out, case._replace(w13=part.w13, w2=part.w2, biases=rest)


def check_halves(form, tokens, biased, dtype=torch.bfloat16):
    whole, ids = experts_of(form), torch.stack([torch.randperm(6)[:3] for _ in range(tokens)]).int()
    biases = Biases(torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN)) if biased else Biases()
    biases = Biases(*(None if one is None else one.to(dtype) for one in biases))
    x = torch.randn(tokens, HIDDEN).to(dtype)
    case = Inputs(x, ids, torch.rand(ids.shape), *whole, "silu", biases, Held(1, EXPERTS, 6))
    out, rest = halves(case, first_of(form))
    wide = Biases(*(None if one is None else one.float() for one in biases))
    want = fused_experts_reference(case._replace(x=x.float(), biases=wide))
    up = None if biases.up is None else rest.biases.up.float()
    got = out + fused_experts_reference(rest._replace(x=x.float(), biases=Biases(up, rest.biases.down)))
    assert (got - want).norm() < 1e-2 * want.norm()
    return rest


@needs_compiler
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("form, dtype", CASES)
def test_both_parts_make_the_whole(form, tokens, biased, dtype):
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        rest = check_halves(form, tokens, biased, dtype)
    torch.set_num_threads(before)
    assert rest.biases.down is None


@pytest.mark.parametrize("isa", TILES)
@pytest.mark.parametrize("form", ["bf16", "q4_k", "e4m3"])
def test_by_tiles(tiled, isa, form):
    """Of many rows; steps that are split have fewer."""
    tiled(isa)
    check_halves(form, 24, True)


LARGE = Costs((1.0, 2.0, 3.0, 4.0), 1.0)  # of seconds, so that beginning takes nothing


@pytest.mark.parametrize(
    "read, want", [(1.0, 384), (2.0, 512), (0.5, 256), (3.0, 640), (4.0, 640), (100.0, 768), (0.01, 128)]
)
def test_both_are_done_as_soon_as_they_can_be(read, want):
    """read: seconds that a GPU takes for a whole expert, a CPU takes 1."""
    assert split_experts.on_cpu(768, 128, [LARGE._replace(copy=read / split_experts.READ)]) == want


QWEN = Costs((33e-6,) * 4, 69e-6)  # of Qwen3-30B-A3B in Q4_K


def test_who_begins_later():
    assert split_experts.on_cpu(768, 64, [QWEN]) == 576 and split_experts.on_cpu(768, 256, [QWEN]) == 512
    assert split_experts.on_cpu(768, 768, [QWEN]) == 768
    few = Costs((1e-7,) * 4, 1e-7)  # most of the time nobody computes
    assert split_experts.on_cpu(768, 64, [few]) == 768


def test_one_choice_for_all_layers():
    """However noisy what was measured of copies beside the CPU is."""
    slow = QWEN._replace(cpu=(66e-6,) * 4, cpu_beside=1.5, copy_beside=2.0)
    fast = QWEN._replace(cpu=(8e-6,) * 4, cpu_beside=1.5)
    for layers, want in (([slow], 448), ([fast], 768), ([fast] + [slow] * 9, 448), ([fast] * 9 + [slow], 768)):
        assert split_experts.on_cpu(768, 64, layers) == want
