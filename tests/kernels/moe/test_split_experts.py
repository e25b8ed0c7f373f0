"""Experts of which the CPU computes some units and a GPU the others: both parts make what the whole makes."""

import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.moe import split_experts
from phalanx.kernels.moe.host_choice import Costs
from phalanx.kernels.moe.host_experts import Experts, HostPairs, host_biases
from phalanx.kernels.moe.moe import Biases, Held, Inputs, fused_experts, fused_experts_reference, matrix
from phalanx.kernels.quantized import affine, e4m3, gpu_form, mxfp4, pieces_cuda, q4_0, q4_k, q5_1, q6_k, q8_0
from phalanx.kernels.quantized.stack import stack

from ..conftest import TILES

EXPERTS, HIDDEN, INNER, FIRST = 4, 272, 768, 512
HIDDEN_OF_BLOCKS = 256  # super-blocks have as many inputs


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


FORMS = {  # of w13 and w2, and units that stay together
    "q4_k": (coded(q4_k), coded(q6_k), 256), "q4_0": (coded(q4_0), coded(q5_1), 64),
    "q8_0": (coded(q8_0), coded(q8_0), 64), "e4m3": (coded(e4m3), coded(e4m3), 256),
    "int4": (int4(64, True), int4(128, True), 128), "zeros": (int4(32, False), int4(32, False), 64),
    "mxfp4": (mxfp4_of, mxfp4_of, 64), "mixed": (coded(q8_0), torch.Tensor.bfloat16, 64),
    "bf16": (torch.Tensor.bfloat16, torch.Tensor.bfloat16, 64),
}  # fmt: skip
needs_compiler = pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")


def experts_of(form, hidden=HIDDEN_OF_BLOCKS):
    torch.manual_seed(0)
    shapes = (EXPERTS, 2 * INNER, hidden), (EXPERTS, hidden, INNER)
    up, down, _ = FORMS[form]
    return Experts(*(make(torch.randn(shape) / 16) for make, shape in zip((up, down), shapes, strict=True)))


def plain(one):
    return torch.stack([matrix(one, e, torch.float32) for e in range(one.shape[0])])


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_a_cut_has_the_weights_of_the_last_units(form):
    """Also as GPUs have them."""
    whole = experts_of(form)
    assert split_experts.unit(whole) == FORMS[form][2]
    part = split_experts.last_units(whole, FIRST)
    w13, w2 = (plain(one) for one in whole)
    want = w13.unflatten(1, (2, -1))[:, :, FIRST:].flatten(1, 2), w2[:, :, FIRST:]
    for one, same in zip(part, want, strict=True):
        there = gpu_form.of_gpu(one)
        assert one.shape == there.shape == same.shape
        assert torch.equal(plain(one), same) and torch.equal(plain(there), same)
        assert isinstance(there, torch.Tensor) or isinstance(there.packed, pieces_cuda.Packed)
    assert split_experts.reads(Experts(*map(gpu_form.of_gpu, part)), torch.bfloat16) == (form != "mixed")


@needs_compiler
def test_outputs_that_blocks_do_not_divide():
    whole = Experts(*(coded(q8_0)(torch.randn(shape)) for shape in ((2, 256, 96), (2, 40, 128))))
    part = split_experts.last_units(whole, 64)
    assert part.w2.shape == (2, 40, 64)
    assert torch.equal(plain(part.w2), plain(whole.w2)[:, :, 64:])
    assert torch.equal(plain(gpu_form.of_gpu(part.w2)), plain(part.w2))


@needs_compiler
def test_what_cannot_be_cut():
    float_groups = torch.randn(2, 64, 96)
    codes, scales = torch.randint(0, 120, (2, 64, 96), dtype=torch.uint8), torch.rand(2, 64, 1)
    of_rows = stack(e4m3, lambda expert: (codes[expert], scales[expert]), codes.shape)
    for w13, w2 in ((float_groups, of_rows), (torch.randn(2, 80, 64), torch.randn(2, 64, 40))):
        experts = Experts(w13, w2)
        unit = split_experts.unit(experts)
        assert split_experts.on_cpu(w2.shape[2], unit, Costs((1.0,) * 4, 1.0)) == w2.shape[2]


def halves(case, units):
    """What the CPU makes of the first units, in f32, and the inputs of who has the others."""
    x, ids, weights, w13, w2, act, biases, held = case
    first = held.first
    pairs = HostPairs(x, ids, weights, act, host_biases(split_experts.biases_of(biases, 0, units)), first)
    at, out = torch.arange(EXPERTS), torch.empty(x.shape)
    ops.run(*pairs.all_calls(Experts(w13, w2), at, out, units).calls)
    part = split_experts.last_units(Experts(w13, w2), units)
    rest = split_experts.biases_of(biases, units, w2.shape[2])
    return out, case._replace(w13=part.w13, w2=part.w2, biases=rest)


def check_halves(form, tokens, biased, dtype=torch.bfloat16):
    whole, ids = experts_of(form), torch.stack([torch.randperm(6)[:3] for _ in range(tokens)]).int()
    biases = Biases(torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN_OF_BLOCKS)) if biased else Biases()
    biases = Biases(*(None if one is None else one.to(dtype) for one in biases))
    x = torch.randn(tokens, HIDDEN_OF_BLOCKS).to(dtype)
    case = Inputs(x, ids, torch.rand(ids.shape), *whole, "silu", biases, Held(1, EXPERTS, 6))
    out, rest = halves(case, FIRST)
    wide = Biases(*(None if one is None else one.float() for one in biases))
    want = fused_experts_reference(case._replace(x=x.float(), biases=wide))
    up = None if biases.up is None else rest.biases.up.float()
    got = out + fused_experts_reference(rest._replace(x=x.float(), biases=Biases(up, rest.biases.down)))
    assert (got - want).norm() < 1e-2 * want.norm()
    return rest


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "mixed"])
def test_both_parts_make_the_whole(form, tokens, biased, dtype):
    if form == "bf16" and dtype == torch.float16:
        return
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        rest = check_halves(form, tokens, biased, dtype)
    torch.set_num_threads(before)
    assert rest.biases.down is None and torch.isfinite(fused_experts(rest).float()).all()


@pytest.mark.parametrize("isa", TILES)
@pytest.mark.parametrize("form", ["bf16", "q4_k", "e4m3"])
def test_by_tiles(tiled, isa, form):
    """Of many rows; steps that are split have fewer."""
    tiled(isa)
    check_halves(form, 24, True)


@pytest.mark.parametrize(
    "copy, want",
    [(1.0, 384), (2.0, 512), (0.5, 256), (3.0, 640), (4.0, 640), (100.0, 768), (0.01, 128)],
)
def test_both_are_done_as_soon_as_they_can_be(copy, want):
    assert split_experts.on_cpu(768, 128, Costs((1.0, 2.0, 3.0, 4.0), copy)) == want


def test_who_slows_the_other_down_and_what_large_units_leave():
    costs = Costs((33e-6,) * 4, 58e-6)
    assert split_experts.on_cpu(768, 256, costs) == split_experts.on_cpu(768, 64, costs) == 512
    assert split_experts.on_cpu(768, 0, costs) == split_experts.on_cpu(768, 768, costs) == 768
    for more, want in ((dict(cpu_beside=1.3), 512), (dict(cpu_beside=1.4), 768), (dict(copy_beside=1.6), 768)):
        assert split_experts.on_cpu(768, 256, costs._replace(**more)) == want
