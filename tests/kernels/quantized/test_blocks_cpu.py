"""Weights in blocks on CPUs: forms that no file of ggml's has, and tiles beside vectors, bit by bit."""

import ctypes

import pytest
import torch
from phalanx.kernels.activation.activation import CLAMPED_SWIGLU, clamped, gated_activation
from phalanx.kernels.cpp import ops
from phalanx.kernels.cpp.scratch import Scratch
from phalanx.kernels.quantized import affine, blocks_cpu, cpu_layouts, e4m3_cpu, floats, linear, mxfp4
from phalanx.kernels.quantized.blocks_cpu import Gated
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.super_blocks import q4_k, q6_k

from ..conftest import DTYPES, EMULATED, OPTIMISED, TILES, VECTORS, close, planes_error
from .codecs import name_of

OUTPUTS, INPUTS = 23, 256
GATED = "silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu", "clamped_silu", "silu_clamped"


def int4(outputs, inputs, group, zeros):
    """The packed form and the weight [O, I]."""
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // group) - 0.3).half().float()
    at = torch.randint(0, 17, scales.shape).short() if zeros else torch.full(scales.shape, 8).short()
    weight = (codes.unflatten(1, (-1, group)) - at.unsqueeze(2)) * scales.unsqueeze(2)
    return affine.pack(codes, scales, at), weight.flatten(1)


def e2m1(outputs, inputs):
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.randint(119, 130, (outputs, inputs // 32), dtype=torch.uint8)
    return mxfp4.pack(codes, scales), linear.dequantize(floats.pack(codes, scales))


FORMS = {
    "int4": lambda: int4(OUTPUTS, INPUTS, 64, False),
    "int4-zeros": lambda: int4(OUTPUTS, INPUTS, 128, True),
    "mxfp4": lambda: e2m1(OUTPUTS, INPUTS),
}


def other(codec):
    """A codec with another test of its own: the packed form alone."""
    return lambda: (codec.pack(*codec.encode(torch.randn(OUTPUTS, INPUTS))), None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_linear(isa, called, name, dtype):
    packed, weight = FORMS[name]()
    assert torch.equal(packed.dequantize(torch.float32, 0, OUTPUTS), weight)
    called.clear()
    for rows in (1, 3, 6):
        x, bias = torch.randn(rows, INPUTS).to(dtype), torch.randn(OUTPUTS).to(dtype)
        want = x.double() @ weight.double().T + bias.double()
        close(blocks_cpu.linear(x, packed, bias=bias), want, dtype, atol=planes_error(dtype, weight))
    assert set(called) == {f"{one}_{ops.SUFFIXES[dtype]}" for one in ("split", f"{name.replace('-', '_')}_linear")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(isa, called, dtype):
    """A prompt's rows are multiplied as a decode step's, to the bit, where one instruction adds up four products."""
    packed, _ = FORMS["int4"]()
    x, bias = torch.randn(2 * blocks_cpu.MAX_ROWS + 5, INPUTS).to(dtype), torch.randn(OUTPUTS).to(dtype)
    assert blocks_cpu.supports(x[: blocks_cpu.MAX_ROWS], packed)
    fours = "avx512_vnni", "avx512_bf16", "neon_dotprod", "sve256", "sve512"
    matrices = "amx", "neon_bf16", "sve256_bf16", "sve512_bf16"  # fast ones of bf16
    assert blocks_cpu.supports(x, packed) == (isa in fours or isa in matrices and dtype == torch.float32)
    made = linear.linear(x, packed, bias=bias)
    called.clear()
    some = torch.cat([blocks_cpu.linear(one, packed, bias=bias) for one in x.split(blocks_cpu.MAX_ROWS)])
    assert [one.split("_")[-2] for one in called] == ["split", "linear"] * 3
    if blocks_cpu.supports(x, packed):
        assert torch.equal(made, some)
        assert linear.linear(x, int4(32, INPUTS, 64, False)[0], "silu").shape == (len(x), 16)
    elif dtype == torch.float32:
        close(made, some.double(), dtype, atol=planes_error(dtype, linear.dequantize(packed)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [*GATED, clamped(CLAMPED_SWIGLU, 0.5)])
def test_an_activation_on_the_way(isa, called, act, dtype):
    """Experts' rows, to the bit; rows before and behind theirs are not touched."""
    of = FORMS["int4"]()[0]
    both, ends = torch.randn(6, 2 * INPUTS).to(dtype), torch.tensor([1, 1, 5], dtype=torch.int32)
    rest = (2, OUTPUTS), ends, None
    made = []
    for gated in (True, False):
        x = torch.full((6, INPUTS), 7.0).to(dtype) if gated else gated_activation(both, act)
        y, at = torch.zeros(6, OUTPUTS).to(dtype), torch.zeros(2, dtype=torch.int64)
        called.clear()
        ops.run(*blocks_cpu.experts(x, of, *rest, y, Scratch(6), at, Gated(act, both) if gated else None))
        made += [x[1:5], y]
        assert not gated or (x[[0, 5]] == 7).all() and len(called) == 2
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[3]) and not made[1][[0, 5]].any()


@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize("of", [blocks_cpu, e4m3_cpu], ids=["blocks", "e4m3"])
def test_threads_share_all_blocks_whoever_is_late(isa, of, parts):
    """The part that runs first takes all that is not shared out. The counter is 0 for the next operation."""
    weight, scratch = torch.randn(3 * 304, INPUTS), Scratch(6)
    stack = q8_0.pack(*q8_0.encode(weight)) if of is blocks_cpu else e4m3_cpu.pack(*e4m3_cpu.encode(weight, 128))
    x, ends = torch.randn(6, INPUTS), torch.tensor([0, 1, 1, 6], dtype=torch.int32)
    want, y = (torch.full((6, 304), torch.nan) for _ in range(2))
    ops.run(*of.experts(x, stack, (3, 304), ends, None, want, scratch))
    for order in (range(parts), range(parts)[::-1]):
        for op, values in of.experts(x, stack, (3, 304), ends, None, y.fill_(torch.nan), scratch):
            run = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)(op.address)
            for part in order:
                run(ops.pack(values), part, parts)
        assert torch.equal(y, want) and not scratch.taken.any()


def test_groups_that_no_form_of_4_bits_takes():
    if not ops.available():
        pytest.skip("no C++ compiler that works")
    assert int4(8, 128, 32, True)[0].layout is cpu_layouts.int4(32, True)
    assert int4(8, 96, 32, True)[0].layout is cpu_layouts.Q8_0  # GPUs have packed tiles of 64 inputs


def test_scales_at_their_ends():
    if not ops.available():
        pytest.skip("no C++ compiler that works")
    codes, scales = torch.full((4, 16), 0x7A, dtype=torch.uint8), torch.tensor([[0], [1], [2], [254]]).byte()
    packed, want = mxfp4.pack(codes, scales), linear.dequantize(floats.pack(codes, scales))
    assert torch.equal(linear.dequantize(packed, torch.float32, 0, 4), want) and want[0, 0] == -(2.0**-127)


@pytest.mark.timeout(300)  # the optimised ones take their time to compile
@pytest.mark.parametrize("isa", [*TILES, pytest.param(OPTIMISED, marks=[*TILES[0].marks, pytest.mark.long])])
def test_tiles_make_what_vectors_make(tiled, isa):
    forms = FORMS | {name_of(one): other(one) for one in (q4_k, q6_k, q8_0)}
    for name, make in forms.items():
        tiled(VECTORS)
        packed = make()[0]
        for dtype in DTYPES:
            x, bias = torch.randn(38, INPUTS).to(dtype), torch.randn(OUTPUTS).to(dtype)
            x[17, 40], x[37, 3] = float("nan"), 1e-30
            for rows in (3, 4, 15, 16, 17, 38):
                made = []
                for one in (VECTORS, isa):
                    tiled(one)
                    made.append(blocks_cpu.linear(x[:rows], packed, bias=bias))
                vectors, tiles = (one.nan_to_num(7) for one in made)
                if isa == EMULATED:  # compiled with other flags, so products and sums round together elsewhere
                    close(tiles, vectors, dtype)
                else:
                    assert tiles.equal(vectors), (name, dtype, rows)
