"""Kernels of quantised weights in packed tiles against f64, with NaN behind x and in all that is written."""

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.device import device_caps
from phalanx.kernels.gemm.linear import linear
from phalanx.kernels.norm import norm
from phalanx.kernels.quantized import cuda_layouts, packed_gemm, quantized_gemm, quantized_wgmma, super_blocks
from phalanx.kernels.quantized import linear as linear_of
from phalanx.kernels.quantized.e4m3_wgmma import E4m3Config
from phalanx.kernels.quantized.quantized_gemm import GemvConfig
from phalanx.kernels.quantized.quantized_wgmma import WgmmaConfig
from torch.nn.functional import gelu, silu

from ...devices import needs_hopper, needs_tma, require_gpu
from ..gpu import NAN, poison  # noqa: F401
from . import floats_cases, layouts

require_gpu()
DTYPES = [torch.bfloat16, torch.float16]
HALF_UNIT = {torch.bfloat16: 2**-9, torch.float16: 2**-12}  # of the last place
# Bounds of the norm of the error, in these. Rounded outputs are off by 0.85, those of rounded weights and scales by
# 1.5. A gate of exact weights is off by 0.85, of rounded ones by 2.2, as the reference rounds its inputs another way.
# Where the library splits a GEMM, it rounds parts, too.
PLAIN, ROUNDED, EXACT_GATED, ROUNDED_GATED, LIBRARY = 1.5, 2.5, 2.0, 4.0, 2.5


def make(outputs, inputs, form="q8_0"):
    """A weight packed on the GPU, its codes and scales as weights have them, and what it means in f64."""
    if form == "q8_0":
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
        scales = (torch.rand(outputs, inputs // 32, device="cuda") / 64 - 1 / 128).half()
        return layouts.q8_0(codes, scales), codes.double() * scales.double().repeat_interleave(32, 1)
    if form == "e4m3":
        plain = floats_cases.make(outputs, inputs, 32)
        packed = layouts.e4m3(*(one.cuda() for one in plain))
        return packed, linear_of.dequantize(plain).double().cuda()
    if form.startswith("e4m3_wide"):
        plain, alone = floats_cases.make(outputs, inputs, 128), form.endswith("weight only")
        return cuda_layouts.pack_wide(*(one.cuda() for one in plain), alone), linear_of.dequantize(
            plain
        ).double().cuda()
    if form in SUPER_BLOCKS:
        return super_blocks_of(outputs, inputs, SUPER_BLOCKS[form])
    group = int(form.split()[1])
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(outputs, inputs // group, device="cuda") / 4 - 1 / 8).half()
    zeros = torch.full(scales.shape, 8, dtype=torch.int16, device="cuda")
    if form.endswith("zeros"):
        zeros = torch.randint(0, 17, scales.shape, dtype=torch.int16, device="cuda")
    wide, at = (one.double().repeat_interleave(group, 1) for one in (scales, zeros))
    return cuda_layouts.pack_int4(codes, scales, zeros), (codes - at) * wide


SUPER_BLOCKS = {name: one.type.form for name, one in super_blocks.CODECS.items()}


def super_blocks_of(outputs, inputs, form):
    codes = torch.randint(0, 2**form.bits, (outputs, inputs), dtype=torch.uint8, device="cuda")
    factors = (torch.rand(outputs, inputs // form.super, 2, device="cuda") / 999 - 1 / 1998).half()
    sizes = 2, outputs, inputs // form.group
    scales, minima = torch.randint(-63, 64, sizes, dtype=torch.int8, device="cuda")
    minima *= form.minima
    decoded = super_blocks.Decoded(codes, factors, scales, minima)
    packed = cuda_layouts.pack_super_blocks(decoded, form)
    return packed, super_blocks.weights(decoded, form).double()


def rows_of(rows, inputs, dtype):
    """x, and NaN behind it."""
    room = torch.full((rows * inputs + (1 << 14),), NAN, device="cuda", dtype=dtype)
    return room[: rows * inputs].view(rows, inputs).copy_(torch.randn(rows, inputs, device="cuda"))


def gate(y, dtype, act="silu"):
    """act of the first half times the second, both rounded."""
    first, second = y.to(dtype).double().chunk(2, 1)
    return (silu(first) if act == "silu" else gelu(first, approximate="tanh")) * second


def bound(x, packed, act):
    config, _ = packed_gemm._plan(len(x), packed, act, device_caps(x.device))
    if isinstance(config, E4m3Config):  # tensor cores add up products of 8 bits less exactly than f32 would
        return (2 if x.dtype == torch.bfloat16 else 8) * (2 if act else 1)
    rounded = isinstance(config, WgmmaConfig)
    return (ROUNDED if rounded else PLAIN) if not act else ROUNDED_GATED if rounded else EXACT_GATED


def check(found, want, about, most):
    assert all(y.shape == want.shape and y.isfinite().all() for y in found), about
    apart = ((found[0].double() - want).norm() / want.norm()).item()
    assert apart < most * HALF_UNIT[found[0].dtype], (about, apart)
    differ = [(y != found[0]).nonzero() for y in found]
    assert not any(map(len, differ)), (about, [(len(at), at[:8].tolist(), at[-1:].tolist()) for at in differ])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "outputs, inputs, form",
    [
        (16, 64, "q8_0"), (37, 96, "q8_0"), (37, 192, "q8_0"), (64, 512, "q8_0"), (192, 4096, "q8_0"),
        (130, 1056, "q8_0"), (128, 14336, "q8_0"), (16, 64, "int4 64"),
        (37, 192, "int4 32 zeros"), (192, 4096, "int4 128 zeros"), (128, 14336, "int4 128"),
        (16, 64, "e4m3"), (37, 96, "e4m3"), (192, 4096, "e4m3"),
        (37, 256, "e4m3_wide"), (192, 4096, "e4m3_wide"), (128, 14336, "e4m3_wide"),
        (192, 4096, "e4m3_wide weight only"),
        (37, 512, "q4_k"), (192, 4096, "q4_k"), (192, 4096, "q6_k"), (37, 512, "q5_k"), (192, 4096, "q5_k"),
        (37, 192, "q5_1"), (192, 4096, "iq4_xs"), (192, 4096, "tq2_0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64, 65, 100, 129, 200, 256, 257])
def test_linear(rows, outputs, inputs, form, dtype):
    """Linears as chosen, with a bias and a gate; otherwise the weight as it is, and a product."""
    packed, weight = make(outputs, inputs, form)
    x = rows_of(rows, inputs, dtype)
    for bias in (None, torch.randn(outputs, device="cuda").to(dtype)):
        want = floats_cases.as_multiplied(x, packed) @ weight.T + (0 if bias is None else bias.double())
        if not packed_gemm.supports(x, packed, bias=bias):
            check([linear(x, packed_gemm.dequantize(packed, dtype), bias)], want, "dequantized", LIBRARY)
            continue
        check([packed_gemm.linear(x, packed, bias=bias) for _ in range(2)], want, "plain", bound(x, packed, ""))
        if outputs % 2 == 0:
            for act in ("silu", "gelu_tanh"):
                found = [packed_gemm.linear(x, packed, act, bias) for _ in range(2)]
                check(found, gate(want, dtype, act), act, bound(x, packed, act))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "outputs, inputs, form",
    [(6144, 4096, "q8_0"), (1344, 2080, "q8_0"), (4096, 14336, "int4 128 zeros"), (1344, 2080, "e4m3"),
     (1344, 2176, "e4m3_wide")],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8])
def test_every_way_of_few_rows(rows, outputs, inputs, form, dtype):
    packed, weight = make(outputs, inputs, form)
    x, bias = rows_of(rows, inputs, dtype), torch.randn(outputs, device="cuda").to(dtype)
    want = x.double() @ weight.T + bias.double()
    for config in (GemvConfig(1, 8, 2), GemvConfig(1, 4, 3), GemvConfig(2, 4, 2)):
        if config.shared(rows, inputs, packed.layout) > 220 << 10 >> (config.blocks == 3):
            continue
        check([packed_gemm.gemm(x, packed, config, "", bias) for _ in range(3)], want, config, PLAIN)
        if config.n_tiles == 2:
            found = [packed_gemm.gemm(x, packed, config, "silu", bias) for _ in range(3)]
            check(found, gate(want, dtype), config, EXACT_GATED)


@needs_tma
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "outputs, inputs, form",
    [(6176, 4096, "q4_k"), (1344, 14336, "q4_k"), (4096, 3328, "q6_k"), (1344, 4096, "q5_k"), (1344, 4096, "tq2_0")],
)
def test_every_way_by_groups(outputs, inputs, form, dtype):
    packed, weight = make(outputs, inputs, form)
    x, bias = rows_of(1, inputs, dtype), torch.randn(outputs, device="cuda").to(dtype)
    want = x.double() @ weight.T + bias.double()
    for gated in ("", "silu"):
        for config in quantized_gemm.grouped_configs(inputs, packed.layout, bool(gated)):
            found = [packed_gemm.gemm(x, packed, config, gated, bias) for _ in range(4)]
            check(found, gate(want, dtype) if gated else want, config, EXACT_GATED if gated else PLAIN)


@needs_tma
@pytest.mark.parametrize("form", ["q4_k", "q5_k", "q6_k"])
def test_rows_far_from_zero(form):
    """Codes are more by 128 as they are multiplied: what that adds is large where x sums up to much."""
    packed, weight = make(1344, 4096, form)
    for rows in (1, 2, 4, 7, 16):
        x = rows_of(rows, 4096, torch.bfloat16)
        x += 4
        x[:, 100] = 1000
        want = x.double() @ weight.T
        check([packed_gemm.linear(x, packed) for _ in range(2)], want, rows, PLAIN)


@needs_tma
@pytest.mark.parametrize(
    "outputs, inputs, gated, dtype, form",
    [
        (1344, 2048, "silu", DTYPES[0], "q4_k"),
        (5000, 1024, "", DTYPES[1], "q4_k"),
        (1344, 2048, "silu", DTYPES[0], "q5_k"),
        (5000, 1024, "", DTYPES[1], "q6_k"),
        (1344, 2048, "silu", DTYPES[0], "q8_0"),
        (5000, 1024, "", DTYPES[1], "q8_0"),
        (1344, 2048, "silu", DTYPES[0], "int4 128 zeros"),
        (1344, 2048, "silu", DTYPES[0], "e4m3_wide"),
    ],
)
@pytest.mark.parametrize("rows", [7, 16, 29, 64])
def test_every_config(rows, outputs, inputs, gated, dtype, form):
    """Several times in a row into memory that holds NaN: a race would show as a difference."""
    packed, weight = make(outputs, inputs, form)
    x, bias = rows_of(rows, inputs, dtype), torch.randn(outputs, device="cuda").to(dtype)
    want = x.double() @ weight.T + bias.double()
    want = gate(want, dtype) if gated else want
    configs = list(quantized_gemm.configs(rows, outputs, inputs, packed.layout, bool(gated)))
    sizes = [packed_gemm.sizes(rows, inputs, config, gated, True, packed.layout) for config in configs]
    jit.compile_ahead([jit.variant("quantized_gemm", dtype, **one) for one in sizes], x.device)
    for config in configs:
        found = [packed_gemm.gemm(x, packed, config, gated, bias) for _ in range(4)]
        check(found, want, config, EXACT_GATED if gated else PLAIN)


@needs_hopper
@pytest.mark.parametrize(
    "outputs, inputs, gated, dtype, form",
    [
        (1344, 2048, "silu", DTYPES[0], "q8_0"),
        (5003, 1024, "", DTYPES[1], "q8_0"),
        (1344, 2048, "silu", DTYPES[0], "int4 128"),
        (5003, 1024, "", DTYPES[1], "int4 32 zeros"),
        (1344, 2048, "silu", DTYPES[0], "q5_k"),
        (5003, 1024, "", DTYPES[1], "q6_k"),
    ],
)
@pytest.mark.parametrize("rows", [33, 64, 100, 129, 256])
def test_every_cut_of_many_rows(rows, outputs, inputs, gated, dtype, form):
    packed, weight = make(outputs, inputs, form)
    x, bias = rows_of(rows, inputs, dtype), torch.randn(outputs, device="cuda").to(dtype)
    want = x.double() @ weight.T + bias.double()
    want = gate(want, dtype) if gated else want
    configs = list(quantized_wgmma.configs(rows, inputs, packed.layout, bool(gated)))
    sizes = [packed_gemm.sizes(rows, inputs, config, gated, True, packed.layout) for config in configs]
    jit.compile_ahead([jit.variant("quantized_wgmma", dtype, **one) for one in sizes], x.device)
    for config in configs:
        found = [packed_gemm.gemm(x, packed, config, gated, bias) for _ in range(4)]
        check(found, want, config, ROUNDED_GATED if gated else ROUNDED)


@pytest.mark.parametrize("outputs, inputs, gated", [(6144, 4096, ""), (28672, 4096, "silu"), (4096, 14336, "")])
@pytest.mark.parametrize("rows", [1, 4, 7, 16, 32, 50, 64, 128, 256])
@pytest.mark.parametrize("form", ["q8_0", "int4 128", "int4 64 zeros", "q4_k", "q5_k", "q6_k"])
def test_linears_of_a_model(rows, outputs, inputs, gated, form):
    """Often in a row: all multiprocessors are busy, and the ring goes round many times."""
    packed, weight = make(outputs, inputs, form)
    x = rows_of(rows, inputs, torch.bfloat16)
    if not packed_gemm.supports(x, packed):
        pytest.skip("not on this GPU")
    want = x.double() @ weight.T
    want = gate(want, x.dtype) if gated else want
    check([packed_gemm.linear(x, packed, gated) for _ in range(20)], want, rows, bound(x, packed, gated))


@needs_tma
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 40, 100, 200, 300])
@pytest.mark.parametrize("form", ["q8_0", "int4 128 zeros"])
def test_one_behind_the_other_in_a_graph(rows, dtype, form):
    """Each begins before the one whose outputs it reads has ended; replays are eager calls' equals."""
    sizes = (512, 512), (4096, 512), (512, 2048), (3072, 512), (512, 3072)
    weights = [make(*one, form)[0] for one in sizes]
    gates = ["", "silu", "", "", ""]
    x, ones = rows_of(rows, 512, dtype), torch.ones(4096, device="cuda", dtype=dtype)

    def step(x, pause=lambda: None):
        for _ in range(3):
            for packed, act in zip(weights, gates, strict=True):
                if packed_gemm.supports(x, packed):
                    x = packed_gemm.linear(x, packed, act)
                else:
                    y = linear(x, packed_gemm.dequantize(packed, dtype))
                    x = gate(y, dtype).to(dtype) if act else y
                x = norm.rms_norm(x, ones[: x.shape[1]], 1e-5)
                pause()
        return x

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x)
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        out = step(x)
        graph.capture_end()
        for _ in range(10):
            x.copy_(torch.randn_like(x))
            graph.replay()
            found = out.clone()
            assert found.isfinite().all() and torch.equal(found, step(x, stream.synchronize))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "outputs, inputs, form",
    [
        *((*sizes, "q8_0") for sizes in ((1, 32), (16, 64), (37, 4096), (4096, 14336), (130, 1184))),
        (1, 64, "int4 64"), (37, 4096, "int4 32 zeros"), (4096, 14336, "int4 128 zeros"), (130, 1088, "int4 32"),
        (37, 4096, "e4m3"), (130, 1184, "e4m3"), (130, 1152, "e4m3_wide"),
        (37, 4096, "q4_k"), (4096, 14336, "q4_k"), (130, 1024, "q6_k"),
        (37, 4096, "q5_k"), (130, 1088, "q5_1"), (37, 4096, "iq4_xs"),
        (37, 4096, "tq2_0"),
    ],
)  # fmt: skip
def test_dequantize(outputs, inputs, form, dtype):
    """Bit for bit: each product is rounded once."""
    packed, weight = make(outputs, inputs, form)
    assert torch.equal(packed_gemm.dequantize(packed, dtype), weight.float().to(dtype))


def test_pack_and_back():
    codes = torch.randint(-128, 128, (1003, 4096), dtype=torch.int8, device="cuda")
    scales = torch.randn(1003, 128, device="cuda").half()
    found = [*layouts.q8_0(codes, scales).numbers().values()]
    assert torch.equal(found[0].view(torch.int8), codes) and torch.equal(found[1], scales)


def test_what_is_refused():
    packed, _ = make(64, 512)
    x = rows_of(4, 512, torch.float16)
    assert packed_gemm.supports(x, packed) and packed_gemm.supports(x, packed, bias=x[0, :64])
    assert not packed_gemm.supports(x.float(), packed) and not packed_gemm.supports(x.cpu(), packed)
    assert not packed_gemm.supports(x[:0], packed) and not packed_gemm.supports(x[:, None], packed)
    assert not packed_gemm.supports(rows_of(257, 512, torch.float16), packed)
    assert not packed_gemm.supports(rows_of(4, 1024, torch.float16)[:, :512], packed)
    assert not packed_gemm.supports(rows_of(1, 520, torch.float16)[0, 1:513][None], packed)
    assert not packed_gemm.supports(x, packed, bias=x[0, :64].bfloat16())
    assert not packed_gemm.supports(x, packed._replace(tiles=packed.tiles.repeat(1, 2, 1)[:, ::2]))
