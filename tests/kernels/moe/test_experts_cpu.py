"""Experts on CPUs in one call, quantised and plain, beside the reference and beside one by one."""

import pytest
import torch
from phalanx.kernels.cpp import ops
from phalanx.kernels.cpp.scratch import Scratch
from phalanx.kernels.moe import host_experts, moe
from phalanx.kernels.moe.moe import Biases, LocalExperts
from phalanx.kernels.quantized import affine, blocks_cpu, e4m3
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.stack import stack
from phalanx.kernels.quantized.super_blocks import q4_0, q4_k, q5_1, q6_k

from ..quantized.codecs import name_of
from .cases import Sizes, make
from .reference import fused_experts_reference

FORMATS = [(q8_0, q8_0), (q4_k, q6_k), (q4_0, e4m3), (e4m3, q5_1)]
# One token, several, all to one expert, and experts without tokens.
SIZES = [
    Sizes(1, 2, 4, 256, 256), Sizes(9, 3, 5, 256, 256), Sizes(33, 1, 3, 512, 256, "one"),
    Sizes(9, 2, 9, 256, 256, "few"),
]  # fmt: skip
needs_compiler = pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")


def quantised(weights, codec):
    return stack(codec, lambda expert: codec.encode(weights[expert]), weights.shape)


def plain(one):
    return torch.stack([one.expert(e, torch.float32) for e in range(one.shape[0])])


@pytest.mark.sample(3)
@needs_compiler
@pytest.mark.parametrize("up, down", FORMATS, ids=name_of)
def test_experts(up, down):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    for i, sizes in enumerate(SIZES):
        torch.set_num_threads(1 + i // 2)
        given = make(sizes, torch.float32)
        local_experts = LocalExperts(1, sizes.experts - 2, sizes.experts) if i % 2 else None
        here = slice(local_experts.first, local_experts.first + local_experts.size) if local_experts else slice(None)
        w13, w2 = quantised(given.w13.nan_to_num(1)[here], up), quantised(given.w2.nan_to_num(1)[here], down)
        for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
            x, biases = given.x.to(dtype), Biases(*(torch.randn(one.shape[:2]).to(dtype) for one in (w13, w2)))
            assert host_experts.supports(x, given.ids, w13, w2)
            case = moe.Inputs(x, given.ids, given.weights, w13, w2, "silu", biases, local_experts)
            got, wide = moe.fused_experts(case), Biases(*(one.float() for one in biases))
            want = fused_experts_reference(case._replace(x=x.float(), biases=wide))
            assert got.dtype == dtype and ((got.float() - want).norm() / want.norm()).item() < bound, sizes
    torch.set_num_threads(before)


@needs_compiler
def test_a_prompt_is_taken_in_parts(monkeypatch):
    """Experts are computed by the number of their rows, as far as the processor is faster with them as they lie."""
    torch.manual_seed(0)
    given = make(Sizes(40, 2, 4, 256, 256), torch.float32)
    w13, w2 = quantised(given.w13, q4_k), quantised(given.w2, q6_k)
    case = given._replace(w13=w13, w2=w2)
    whole = moe.fused_experts(case)
    monkeypatch.setattr(host_experts, "MAX_ROWS", 4)
    monkeypatch.setattr(blocks_cpu, "max_rows", lambda dtype: 20)
    parts, run = [], host_experts._experts
    monkeypatch.setattr(host_experts, "_experts", lambda one: parts.append(len(one.x)) or run(one))
    # To the bit but on AVX2 without VNNI, which converts codes to f32 from three rows on (blocks.h).
    torch.testing.assert_close(moe.fused_experts(case), whole, rtol=1e-5, atol=1e-5)
    assert parts == [8] * 5
    assert not host_experts.supports(given.x.repeat(2, 1), given.ids.repeat(2, 1), w13, w2)
    assert not host_experts.supports(given.x, given.ids, w13, quantised(given.w2, e4m3)), "no int8 planes"


@needs_compiler
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_plain_experts(dtype, bound):
    """Sizes that vectors do not divide; those that no token chooses are NaN."""
    torch.manual_seed(0)
    for i, sizes in enumerate((Sizes(1, 2, 5, 30, 17), Sizes(9, 3, 12, 48, 40), Sizes(33, 1, 3, 64, 32, "one"))):
        given = make(sizes, dtype)
        local_experts = LocalExperts(1, sizes.experts - 2, sizes.experts) if i == 1 else None
        here = slice(local_experts.first, local_experts.first + local_experts.size) if local_experts else slice(None)
        w13, w2 = given.w13[here].contiguous(), given.w2[here].contiguous()
        biases = Biases(*(torch.randn(one.shape[:2]).to(dtype) for one in (w13, w2)))
        assert host_experts.supports(given.x, given.ids, w13, w2)
        given = given._replace(w13=w13, w2=w2, biases=biases, local_experts=local_experts)
        got, want = moe.fused_experts(given), fused_experts_reference(given).float()
        assert got.dtype == dtype and ((got.float() - want).norm() / want.norm()).item() < bound, sizes
    many = torch.zeros(65, 64, dtype=dtype)
    assert not host_experts.supports(many, torch.zeros(65, 1, dtype=torch.int32), w13, w2), "torch is faster"


@needs_compiler
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_make_what_they_make_in_f32(kept):
    """To the bit, of few rows; of many by another kernel."""
    torch.manual_seed(0)
    for sizes, exact in (
        (Sizes(5, 2, 6, 48, 40), True),
        (Sizes(90, 2, 6, 64, 32), False),
        (Sizes(700, 1, 6, 64, 32), False),
    ):
        given = make(sizes, torch.float32)
        small = [one.to(kept) for one in (given.w13, given.w2)]
        biases = Biases(*(torch.randn(one.shape[:2]) for one in small))
        case = given._replace(w13=small[0], w2=small[1], biases=biases)
        assert host_experts.supports(case.x, case.ids, case.w13, case.w2) == (sizes.tokens < 700)
        got, want = (moe.fused_experts(case._replace(w13=a, w2=b)) for a, b in (small, [one.float() for one in small]))
        assert got.dtype == torch.float32
        assert torch.equal(got, want) if exact else ((got - want).norm() / want.norm()).item() < 1e-6, sizes
    assert not host_experts.supports(given.x.to(kept), given.ids, given.w13, given.w2), "f32 under 16 bits"


@needs_compiler
def test_a_row_of_x_with_a_pitch_and_outputs_that_blocks_do_not_divide():
    torch.manual_seed(0)
    w13, w2 = quantised(torch.randn(4, 64, 96), q8_0), quantised(torch.randn(4, 96, 32), q8_0)
    rows = torch.randn(5, 200)[:, :96]
    ids, weights = torch.tensor([[0, 3], [3, 1], [3, 0], [1, 3], [0, 1]]).int(), torch.rand(5, 2)
    odd = quantised(torch.randn(4, 44, 96), q8_0)
    assert odd.packed.outputs == 4 * 48 and odd.expert(3, torch.float32).shape == (44, 96)
    y, offsets = torch.empty(5, 44), torch.tensor([0, 2, 2, 2, 5], dtype=torch.int32)
    ops.run(*host_experts.linear(rows, odd, odd.shape[:2], offsets, None, y, Scratch(len(rows)), torch.arange(4)))
    want = torch.cat((rows[:2] @ odd.expert(0, torch.float32).T, rows[2:] @ odd.expert(3, torch.float32).T))
    torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-5)
    given = moe.Inputs(rows, ids, weights, w13, w2)
    assert torch.equal(moe.fused_experts(given), moe.fused_experts(given._replace(x=rows.contiguous())))


@pytest.mark.parametrize("up, down", FORMATS[:2], ids=name_of)
def test_without_a_compiler_and_of_many_tokens(monkeypatch, up, down):
    """Each expert is dequantised, and multiplied by torch."""
    torch.manual_seed(0)
    given = make(SIZES[1], torch.float32)
    w13, w2 = quantised(given.w13.nan_to_num(1), up), quantised(given.w2.nan_to_num(1), down)
    monkeypatch.setattr(host_experts, "supports", lambda *_: False)
    got = moe.fused_experts(given._replace(w13=w13, w2=w2))
    want = fused_experts_reference(given._replace(w13=plain(w13), w2=plain(w2)))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_experts_that_pack_into_other_forms_get_one():
    """Zeros of 8-bit codes far from the middle have no form but the plain one."""
    codes = torch.randint(0, 256, (3, 32, 64), dtype=torch.uint8)
    scales, zeros = torch.full((3, 32, 2), 0.5), torch.full((3, 32, 2), 128, dtype=torch.int16)
    zeros[1] = 3
    found = stack(affine, lambda e: (codes[e], scales[e], zeros[e]), codes.shape)
    assert isinstance(found.packed, affine.Affine)
    want = (codes.float() - zeros.float().repeat_interleave(32, 2)) * 0.5
    assert torch.equal(plain(found), want) and torch.equal(found.plain(torch.float32), want)
