"""ggml's types beside gguf-py's: dequantised bit for bit, encoded alike or with a bounded error; and the GEMMs."""

import gguf
import numpy as np
import pytest
import torch
from phalanx.kernels.cpp import graph, ops
from phalanx.kernels.quantized import (
    blocks_cpu,
    cpu_layouts,
    cuda_layouts,
    ggml_encoders,
    ggml_types,
    linear,
    scale_search,
    super_blocks,
)

from ..conftest import DTYPES, close, planes_error
from ..interpreter import interpret
from ..test_compile import Recorder, compile_launch
from . import codecs, search_cases

TYPES = [name for name in ggml_types.TYPES if name != "q8_0"]
TWO_LEVELS = list(super_blocks.CODECS)
KINDS = ("q4_k", "q3_k", "q5_k", "q6_k", "q4_1", "iq4_xs")  # all that kernels tell apart
EXACT = ("q4_0", "q4_1", "q5_0", "q5_1")  # gguf-py encodes these
# Root of the mean squared error of normal weights beside their deviation. Q4_1, of 5 bits, has 0.078 and Q5_1 0.038.
ERRORS = {"q2_k": 0.275, "q3_k": 0.146, "q4_k": 0.073, "q5_k": 0.0365, "q6_k": 0.0176}


def codec(name):
    return codecs.find(name)


def random_blocks(name, outputs, inputs):
    """uint8 [O, bytes], all bits random but f16 numbers, which are of either sign."""
    group, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (outputs, inputs // group, size), dtype=np.uint8)
    for at in ggml_types.TYPES[name].factors_at:
        scales = draw.normal(0, 0.01, (outputs, inputs // group, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(outputs, -1))


def theirs(name, blocks):
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name.upper()]))


def packed_of(name, outputs=24, inputs=512):
    one, blocks = codec(name), random_blocks(name, outputs, inputs)
    return one, one.pack(blocks), theirs(name, blocks)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", TYPES)
def test_weights_are_ggufs(monkeypatch, name, compiled):
    if not compiled:
        monkeypatch.setattr(ops, "available", lambda: False)
    monkeypatch.setattr(super_blocks, "CHUNK", 17 * 512)  # decoded by sixteen outputs
    one, packed, want = packed_of(name, 37)
    assert packed.outputs == 37 and torch.equal(linear.dequantize(packed), want)
    assert torch.equal(linear.dequantize(packed, torch.float32, 16, 99), want[16:])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(linear.dequantize(packed, dtype), want.to(dtype))


@pytest.mark.parametrize("name", KINDS)
def test_weights_of_each_instruction_set(isa, name):
    one, packed, want = packed_of(name)
    assert isinstance(packed, cpu_layouts.Packed) and torch.equal(linear.dequantize(packed), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_linear(isa, threads, called, name, dtype):
    outputs, inputs = 23, 512
    one, packed, weight = packed_of(name, outputs, inputs)
    called.clear()
    for rows in (1, 3, 4, 6):
        x = torch.randn(rows, 2 * inputs).to(dtype)[:, :inputs]
        x.as_strided((rows, 2 * inputs), (2 * inputs, 1))[:, inputs:] = float("nan")  # read by nobody
        for bias in (None, torch.randn(outputs).to(dtype)):
            want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            close(linear.linear(x, packed, bias=bias), want, dtype, atol=planes_error(dtype, weight))
    assert all("split" in call or "_linear_" in call for call in called) and len(called) == 16


@pytest.mark.parametrize("rows", [1, blocks_cpu.MAX_ROWS + 1])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("compiled", [True, False])
def test_gates_and_what_is_left_to_panels(monkeypatch, name, rows, compiled):
    if not compiled:
        monkeypatch.setattr(ops, "available", lambda: False)
    one, packed, weight = packed_of(name, 48)
    x, bias = torch.randn(rows, 512) * 0.1, torch.randn(48)
    gate, up = (x @ weight.T + bias).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    atol = 1e-4 + 0.1 * planes_error(torch.float32, weight) * (gate.abs() + 1.1 * up.abs()).max().item()
    for panel in (1 << 20, 16 * 512):
        monkeypatch.setitem(linear.PANEL, "cpu", panel)
        torch.testing.assert_close(linear.linear(x, packed, "silu", bias), want, atol=atol, rtol=1e-4)


def test_values_that_are_not_finite_stay_in_their_row(isa):
    one, packed, _ = packed_of("q4_k")
    x = torch.ones(5, 512)
    x[2, 33], x[4, 1] = float("nan"), float("inf")
    y = linear.linear(x, packed)
    assert not y[[2, 4]].isfinite().any() and y[[0, 1, 3]].isfinite().all()


def test_it_is_recorded():
    if not ops.available():
        pytest.skip("no C++ compiler that works")
    one, packed, _ = packed_of("q4_k", 48)
    x = torch.randn(2, 512)
    result, made, reason = graph.capture(lambda: linear.linear(x, packed, "silu"), graph.Memory())
    assert reason == "" and len(made) == 3
    x.copy_(torch.randn(2, 512))
    want = linear.linear(x, packed, "silu")
    made.replay()
    torch.testing.assert_close(result, want)


def awkward():
    """Halves, ends, zeros, one value alone, and scales that f16 holds badly."""
    weight = torch.randn(9, 256) * torch.logspace(-8, 3, 9)[:, None]
    weight[0] = 0
    weight[1, :32] = torch.arange(-16, 16) + 0.5
    weight[2, 32:64] = -1
    return weight


def as_gguf_does(name, weight):
    one, kind = codec(name), gguf.GGMLQuantizationType[name.upper()]
    blocks = torch.from_numpy(gguf.quants.quantize(weight.float().numpy(), kind))
    found = one.encode(weight)
    assert torch.equal(*found, blocks)
    assert torch.equal(linear.dequantize(one.pack(*found)), theirs(name, blocks))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("name", EXACT)
def test_encoded_as_gguf_does(isa, threads, called, name, dtype):
    """Groups that fill vectors and threads or not."""
    for weight in (awkward(), awkward().abs(), torch.randn(1, 32), torch.randn(37, 96) * 0.03):
        called.clear()
        as_gguf_does(name, weight.clamp(-6e4, 6e4).to(dtype))
        assert called[0] == f"encode_{name}_{ops.READ[dtype]}"


@pytest.mark.parametrize("name", EXACT)
def test_encoded_in_torch_as_gguf_does(monkeypatch, name):
    monkeypatch.setattr(ops, "available", lambda: False)
    monkeypatch.setattr(ggml_encoders, "CPU_CHUNK", 700)  # two rows at a time
    for dtype in DTYPES:
        as_gguf_does(name, awkward().to(dtype))


@pytest.mark.parametrize("name", EXACT)
def test_ends_of_f32_are_encoded_in_cpp_as_in_torch(isa, name):
    """Scales whose inverse is infinite, or which are too large for f16 or for codes to be the nearest ones."""
    one, draw = codec(name), torch.Generator().manual_seed(0)
    weight = torch.randn(80, 64, generator=draw) * torch.logspace(-44, 38, 80, dtype=torch.float64)[:, None]
    weight = weight.float()
    weight[::4, ::5], weight[1::4] = 0, weight[1::4].sign() * weight[1::4, :1]
    blocks = ggml_encoders.encode(one.type, weight)
    want = ggml_encoders.encode_groups(one.type, weight.view(80, 2, 1, 32)).flatten(1)
    assert torch.equal(blocks, want) and torch.equal(*one.encode(weight), want)


@pytest.mark.parametrize("name", ERRORS)
def test_encoders_lose_little(name):
    one, draw = codec(name), torch.Generator().manual_seed(0)
    weight = torch.randn(64, 1024, generator=draw) * 0.03
    (blocks,) = one.encode(weight)
    error = (theirs(name, blocks) - weight).square().mean().sqrt() / weight.std()
    assert ERRORS[name] / 2 < error < ERRORS[name]
    for odd in (torch.zeros(2, 256), torch.ones(2, 256), -torch.ones(2, 256), awkward()):
        found = theirs(name, one.encode(odd)[0])
        assert found.isfinite().all() and (found - odd).abs().max() <= 0.5 * odd.abs().max()
    assert torch.equal(one.encode(weight.bfloat16())[0], one.encode(weight.bfloat16().float())[0])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("name", ERRORS)
def test_encoded_in_cpp_as_in_torch(isa, threads, called, name, dtype):
    """Bit for bit, from the same scales: super-blocks that fill vectors and threads or not."""
    one, draw = codec(name), torch.Generator().manual_seed(0)
    shapes = [torch.randn(*shape, generator=draw) * 0.03 for shape in ((1, 256), (5, 768), (37, 512))]
    zeros = torch.zeros(2, 256)
    zeros[1, 200] = 3e-7  # its factor is one of f16's smallest numbers, or 0
    for weight in (*shapes, awkward(), awkward() * 1e-3, awkward().abs(), zeros, torch.full((3, 256), 6e4)):
        given = weight.to(dtype)
        called.clear()
        (blocks,) = one.encode(given)
        assert called == [f"encode_{name}_{ops.READ[dtype]}"]
        groups = given.float().view(len(weight), -1, 256 // one.type.form.group, one.type.form.group)
        assert torch.equal(blocks, ggml_encoders.encode_groups(one.type, groups).flatten(1))
        assert called[1:] == ["scale_search"]


def test_weights_that_cpp_does_not_read_are_encoded_in_torch(called):
    weight = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    want = codec("q4_k").encode(weight)[0]
    called.clear()
    for same in (weight.double(), weight.T.contiguous().T):
        assert torch.equal(codec("q4_k").encode(same)[0], want)
    assert not any("encode" in call for call in called)


@pytest.mark.parametrize("name", TWO_LEVELS)
def test_layout_on_gpus(name):
    one, blocks = codec(name), random_blocks(name, 37, 512)
    form = one.type.form
    decoded = one.type.decode(blocks.view(37, -1, one.type.bytes))
    layout = cuda_layouts.super_blocks(form)
    packed = cuda_layouts.pack_super_blocks(decoded, form)
    assert packed.tiles.shape == (3, 8, layout.bytes) and packed.inputs == 512
    assert torch.equal(linear.dequantize(packed), theirs(name, blocks))


@pytest.mark.parametrize("size", [16, 32])
def test_scales_are_searched_as_in_torch(isa, threads, called, size):
    search_cases.check(search_cases.make(size))
    assert called == ["scale_search"] * 5


@pytest.mark.parametrize("outputs", [48, 40])
@pytest.mark.parametrize("name", ["q4_k", "q8_0", "q4_0", "e4m3"])
def test_stacks(name, outputs):
    search_cases.check_stack(codec(name), outputs, "cpu")


@pytest.mark.long
def test_search_in_the_interpreter():
    interpret("quantized.search_cases", timeout=110)


@pytest.mark.parametrize(
    "arch", [90, pytest.param(80, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.long)]
)
def test_search_compiles(arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.quantized import scale_search_triton

    groups, scales = search_cases.make(32), torch.empty(200)
    for kernel, minima in (("minima_kernel", scales), ("signed_kernel", None)):
        launches = Recorder()
        with monkeypatch.context() as patch:
            patch.setattr(scale_search_triton, kernel, launches)
            scale_search_triton.search(groups, scales, minima, 15, scale_search.STEPS)
        compile_launch(getattr(scale_search_triton, kernel), *launches.found[0], arch)
