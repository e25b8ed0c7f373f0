"""Kernels of quantised weights in packed tiles, thread by thread on a CPU."""

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.quantized import cuda_layouts, floats, packed_gemm, quantized_gemm, quantized_wgmma, super_blocks
from phalanx.kernels.quantized.linear import dequantize
from phalanx.kernels.quantized.quantized_gemm import GemvConfig, GroupedConfig, TileConfig
from phalanx.kernels.quantized.quantized_wgmma import WgmmaConfig

from .. import cuda_model
from ..cuda_model import Box
from . import floats_cases, layouts

SUPER_BLOCKS = {name: one.type.form for name, one in super_blocks.CODECS.items()}
Q4_K_LAYOUT = cuda_layouts.super_blocks(SUPER_BLOCKS["q4_k"])
Q6_K_LAYOUT = cuda_layouts.super_blocks(SUPER_BLOCKS["q6_k"])
H200 = DeviceCaps(132, "sm_90a", True, True, True)


def make(outputs, inputs, form="q8_0", seed=0):
    """A weight in packed tiles of a format, and what it means in f64."""
    draw = torch.Generator().manual_seed(seed)
    if form == "q8_0":
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=draw)
        scales = (torch.rand(outputs, inputs // 32, generator=draw) / 64 - 1 / 128).half()
        return layouts.q8_0(codes, scales), codes.double() * scales.double().repeat_interleave(32, 1)
    if form == "e4m3":
        plain = floats_cases.make(outputs, inputs, 32, seed=seed)
        return layouts.e4m3(*plain), dequantize(plain).double()
    if form == "e4m3_wide":
        plain = floats_cases.make(outputs, inputs, 128, seed=seed)
        return cuda_layouts.pack_wide(*plain), dequantize(plain).double()
    if form == "mxfp4":
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=draw)
        scales = torch.randint(120, 124, (outputs, inputs // 32), dtype=torch.uint8, generator=draw)
        return layouts.mxfp4(codes, scales), dequantize(floats.pack(codes, scales)).double()
    if form in SUPER_BLOCKS:
        return super_blocks_of(outputs, inputs, SUPER_BLOCKS[form], draw)
    group = int(form.split()[1])
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(outputs, inputs // group, generator=draw) / 8 - 1 / 16).half()
    zeros = torch.full(scales.shape, 8, dtype=torch.int16)
    if form.endswith("zeros"):
        zeros = torch.randint(0, 17, scales.shape, dtype=torch.int16, generator=draw)
    wide, at = (one.double().repeat_interleave(group, 1) for one in (scales, zeros))
    return cuda_layouts.pack_int4(codes, scales, zeros), (codes - at) * wide


def super_blocks_of(outputs, inputs, form, draw):
    codes = torch.randint(0, 2**form.bits, (outputs, inputs), dtype=torch.uint8, generator=draw)
    factors = (torch.rand(outputs, inputs // form.super, 2, generator=draw) / 999 - 1 / 1998).half()
    scales, minima = torch.randint(-63, 64, (2, outputs, inputs // form.group), dtype=torch.int8, generator=draw)
    minima *= form.minima
    decoded = super_blocks.Decoded(codes, factors, scales, minima)
    packed = cuda_layouts.pack_super_blocks(decoded, form)
    return packed, super_blocks.weights(decoded, form).double()


@pytest.fixture
def launched(monkeypatch, cuda_models):
    """Kernels run in the model, in few stages; new tensors hold NaN. Gives the sources that were launched."""
    sources = []

    def kernel(source, name, dtype, shared=0, **sizes):
        library = cuda_models.build(source, {"T": dtype, **sizes})

        def launch(grid, threads, *args, shared=0, cluster=1):
            assert cluster == 1, "the model has none"
            sources.append(source)
            weights = next(a for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.uint8)
            cuda_model.launch(library, grid, threads, args, weights, seed=len(sources))

        return launch

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(jit, "tensor_map", lambda start, rows, columns, height, _: Box(start, rows, columns, height))
    monkeypatch.setattr(packed_gemm, "device_caps", lambda device: H200._replace(num_sms=2))
    for one in (quantized_gemm, quantized_wgmma):
        monkeypatch.setattr(one, "MAX_STAGES", 3)
    real = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: real(x, *a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty", lambda *a, dtype, device: torch.zeros(*a, dtype=dtype).fill_(float("nan")))
    return sources


def inputs_of(rows, outputs, inputs, dtype):
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=draw).to(dtype)
    return x, torch.randn(outputs, generator=draw).to(dtype)


def gate(y, dtype):
    first, second = y.to(dtype).double().chunk(2, 1)
    return torch.nn.functional.silu(first) * second


def near(got, want, most=3e-3):
    assert got.shape == want.shape and got.isfinite().all()
    assert ((got.double() - want).norm() / want.norm()).item() < most


def in_types(short, *long):
    """Cases and their element types. The long run has other ways and sizes, and each format's first case in f16."""
    first = {one[-1]: one for one in reversed(short)}.values()
    later = [*((*one, torch.bfloat16) for one in long), *((*one, torch.float16) for one in first)]
    return [*((*one, torch.bfloat16) for one in short), *(pytest.param(*one, marks=pytest.mark.long) for one in later)]


GEMVS = in_types(
    [
        (1, 48, 256, GemvConfig(1, 8, 2), "q8_0"),
        (8, 16, 32, GemvConfig(1, 8, 2), "q8_0"),
        (5, 80, 2336, GemvConfig(2, 4, 2), "q8_0"),
        (7, 40, 2368, GemvConfig(2, 4, 2), "int4 32 zeros"),
        (3, 33, 1056, GemvConfig(2, 4, 2), "e4m3"),
        (7, 33, 1408, GemvConfig(1, 4, 2), "e4m3_wide"),
        (1, 48, 512, GemvConfig(1, 8, 2), "q4_k"),
        (3, 40, 1280, GemvConfig(1, 4, 2), "q6_k"),
        (2, 33, 512, GemvConfig(1, 4, 2), "iq4_xs"),
        (2, 33, 512, GemvConfig(1, 4, 2), "tq2_0"),
    ],
    (2, 40, 4096, GemvConfig(1, 4, 3), "q8_0"),
    (1, 48, 512, GemvConfig(1, 8, 2), "int4 128"),
    (4, 33, 1088, GemvConfig(1, 4, 3), "int4 64 zeros"),
    (2, 33, 1088, GemvConfig(2, 2, 2), "q4_1"),
    (2, 33, 1088, GemvConfig(2, 2, 2), "q5_1"),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows, outputs, inputs, config, form, dtype", GEMVS)
def test_gemv(rows, outputs, inputs, config, form, dtype, launched):
    (packed, weight), (x, bias) = make(outputs, inputs, form), inputs_of(rows, outputs, inputs, dtype)
    want = x.double() @ weight.T
    near(packed_gemm.gemm(x, packed, config), want)
    near(packed_gemm.gemm(x, packed, config, bias=bias), want + bias.double())
    assert launched == ["quantized_gemv"] * 2


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "rows, outputs, inputs, form", [(1, 96, 256, "q8_0"), (4, 32, 1088, "q8_0"), (2, 64, 640, "int4 64 zeros")]
)
def test_gated_gemv(rows, outputs, inputs, form, launched):
    (packed, weight), (x, bias) = make(outputs, inputs, form), inputs_of(rows, outputs, inputs, torch.bfloat16)
    want = x.double() @ weight.T + bias.double()
    near(packed_gemm.gemm(x, packed, GemvConfig(2, 4, 2), "silu", bias), gate(want, x.dtype))


GROUPED = in_types(
    [(40, 4096, 4, "q4_k"), (40, 1280, 2, "q6_k"), (49, 1280, 4, "q5_k")],
    (33, 512, 4, "q4_k"),
    (33, 1024, 4, "q4_1"),
    (33, 1024, 4, "iq4_xs"),
    (33, 1024, 4, "tq2_0"),
    (33, 1280, 4, "q6_k"),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("outputs, inputs, run, form, dtype", GROUPED)
def test_grouped(outputs, inputs, run, form, dtype, launched, monkeypatch):
    """Blocks have several tiles, the last one is not whole, and the rings go round."""
    monkeypatch.setattr(quantized_gemm, "MAX_GROUPED_STAGES", 2)
    monkeypatch.setattr(packed_gemm, "device_caps", lambda device: H200._replace(num_sms=1))
    (packed, weight), (x, bias) = make(outputs, inputs, form), inputs_of(1, outputs, inputs, dtype)
    want = x.double() @ weight.T
    near(packed_gemm.gemm(x, packed, GroupedConfig(1, run)), want)
    near(packed_gemm.gemm(x, packed, GroupedConfig(1, run), bias=bias), want + bias.double())
    assert launched == ["grouped_gemv"] * 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["q4_k", "q6_k"])
def test_gated_grouped(form, launched):
    (packed, weight), (x, bias) = make(128, 512, form), inputs_of(1, 128, 512, torch.bfloat16)
    want = x.double() @ weight.T + bias.double()
    near(packed_gemm.gemm(x, packed, GroupedConfig(2, 4), "silu", bias), gate(want, x.dtype))


def test_one_row_alone_is_grouped():
    for inputs in (4096, 14336):
        assert isinstance(packed_gemm.choose(1, 4096, inputs, Q4_K_LAYOUT, False, H200), GroupedConfig)
        assert packed_gemm.choose(2, 4096, inputs, Q4_K_LAYOUT, False, H200) == TileConfig(32, 256, True)


TILES = [
    (3, 112, 256, TileConfig(32, 64), "q8_0"),
    (16, 264, 512, TileConfig(112, 64), "q8_0"),
    (17, 176, 384, TileConfig(48, 128), "q8_0"),
    (17, 100, 384, TileConfig(64, 64), "int4 32 zeros"),
    (8, 200, 1024, TileConfig(48, 128), "e4m3"),
    (8, 80, 1024, TileConfig(48, 256), "e4m3_wide"),
    (8, 80, 512, TileConfig(48, 128), "q4_k"),
    pytest.param(8, 80, 512, TileConfig(48, 128), "q4_1", marks=pytest.mark.long),
    pytest.param(17, 100, 512, TileConfig(64, 64), "q6_k", marks=pytest.mark.long),
    pytest.param(64, 64, 512, TileConfig(32, 128), "int4 64 zeros", marks=pytest.mark.long),
    pytest.param(8, 80, 1024, TileConfig(48, 128), "int4 128", marks=pytest.mark.long),
    pytest.param(13, 96, 1024, TileConfig(64, 256), "q8_0", marks=pytest.mark.long),
    pytest.param(32, 130, 512, TileConfig(64, 64), "q8_0", marks=pytest.mark.long),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows, outputs, inputs, config, form", TILES)
def test_gemm(rows, outputs, inputs, config, form, launched):
    """Blocks have several tiles, and the last one is not whole."""
    for dtype in (torch.bfloat16, torch.float16)[: 1 + (rows < 9)]:
        (packed, weight), (x, bias) = make(outputs, inputs, form), inputs_of(rows, outputs, inputs, dtype)
        want = x.double() @ weight.T + bias.double()
        for _ in range(2):
            near(packed_gemm.gemm(x, packed, config, bias=bias), want)


IN_TURN = [
    (13, 168, 2048, 48, "", "q4_k"),
    (5, 136, 4096, 32, "", "q5_k"),
    (16, 448, 512, 224, "silu", "q4_k"),
    pytest.param(8, 224, 512, 224, "silu", "q4_k", marks=pytest.mark.long),
    pytest.param(11, 264, 2048, 112, "", "q5_k", marks=pytest.mark.long),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows, outputs, inputs, height, gated, form", IN_TURN)
def test_gemm_in_turn(rows, outputs, inputs, height, gated, form, launched, monkeypatch):
    """Each turn has stages of its own; rings go round, and the last tile is not whole."""
    monkeypatch.setattr(quantized_gemm, "MAX_STAGES", 8)
    monkeypatch.setattr(packed_gemm, "device_caps", lambda device: H200._replace(num_sms=1))
    for dtype in (torch.bfloat16, torch.float16)[: 1 + (rows < 9)]:
        (packed, weight), (x, bias) = make(outputs, inputs, form), inputs_of(rows, outputs, inputs, dtype)
        want = x.double() @ weight.T + bias.double()
        got = packed_gemm.gemm(x, packed, TileConfig(height, 256, True), gated, bias)
        near(got, gate(want, dtype) if gated else want)


def test_turns_are_taken_of_few_rows():
    """Too few stages fit for few outputs in tiles of 16 rows: warps share out chunks."""
    for rows, outputs, in_turn in ((8, 4096, True), (16, 4096, False), (16, 6144, True), (17, 6144, False)):
        assert packed_gemm.choose(rows, outputs, 4096, Q4_K_LAYOUT, False, H200).in_turn is in_turn


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "rows, outputs, inputs, config, form",
    [
        (9, 192, 256, TileConfig(64, 64), "q8_0"),
        (30, 160, 256, TileConfig(96, 128), "q8_0"),
        (9, 96, 256, TileConfig(32, 128), "int4 128"),
    ],
)
def test_gated_gemm(rows, outputs, inputs, config, form, launched):
    (packed, weight), (x, bias) = make(outputs, inputs, form), inputs_of(rows, outputs, inputs, torch.bfloat16)
    want = x.double() @ weight.T + bias.double()
    near(packed_gemm.gemm(x, packed, config, "silu", bias), gate(want, x.dtype))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "rows, outputs, inputs, gated, config, dtype, form",
    [
        (33, 150, 512, "", WgmmaConfig(128, 64, 64, 1), torch.bfloat16, "q8_0"),
        (33, 150, 512, "", WgmmaConfig(128, 64, 128, 1), torch.bfloat16, "q8_0"),
        (131, 288, 256, "silu", WgmmaConfig(192, 128, 64, 1), torch.float16, "q8_0"),
        (40, 150, 512, "", WgmmaConfig(128, 64, 128, 1), torch.bfloat16, "int4 32 zeros"),
        (33, 256, 256, "silu", WgmmaConfig(128, 64, 64, 1), torch.float16, "int4 128"),
        (33, 256, 256, "silu", WgmmaConfig(128, 64, 128, 1), torch.bfloat16, "e4m3_wide"),
        (33, 256, 256, "silu", WgmmaConfig(128, 64, 64, 1), torch.bfloat16, "e4m3"),
        (40, 150, 512, "", WgmmaConfig(128, 64, 128, 1), torch.bfloat16, "q4_k"),
        (33, 256, 256, "silu", WgmmaConfig(128, 64, 64, 1), torch.bfloat16, "q6_k"),
        (33, 150, 512, "", WgmmaConfig(128, 64, 128, 1), torch.float16, "q5_k"),
    ],
)
def test_wgmma(rows, outputs, inputs, gated, config, dtype, form, launched):
    """Neither the last tile of outputs nor the last one of rows is whole, and the ring goes round."""
    (packed, weight), (x, bias) = make(outputs, inputs, form), inputs_of(rows, outputs, inputs, dtype)
    want = x.double() @ weight.to(dtype).double().T + bias.double()
    # In bf16 the scales are rounded, too.
    near(packed_gemm.gemm(x, packed, config, gated, bias), gate(want, dtype) if gated else want, 6e-3)
    assert launched == ["quantized_wgmma"]


DEQUANTIZED = in_types(
    [
        (16, 32, "q8_0"),
        (40, 1184, "q8_0"),
        (40, 1152, "int4 32 zeros"),
        (40, 1184, "e4m3"),
        (40, 384, "e4m3_wide"),
        (40, 512, "q4_k"),
        (33, 512, "q6_k"),
        (16, 192, "q4_1"),
        (33, 192, "q5_1"),
        (16, 512, "q5_k"),
        (16, 512, "iq4_xs"),
        (16, 512, "tq2_0"),
        (40, 192, "mxfp4"),
    ],
    (33, 64, "int4 64"),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("outputs, inputs, form, dtype", DEQUANTIZED)
def test_dequantize(outputs, inputs, form, dtype, launched):
    """Bit for bit: each product is rounded once."""
    packed, weight = make(outputs, inputs, form)
    assert torch.equal(packed_gemm.dequantize(packed, dtype), weight.float().to(dtype))


@pytest.mark.parametrize(
    "found", [H200, DeviceCaps(148, "sm_100", True, True, False), DeviceCaps(108, "sm_80", *[False] * 3)]
)
@pytest.mark.parametrize("outputs, inputs", [(6144, 4096), (28672, 4096), (4096, 14336), (1000, 192), (40, 14336)])
@pytest.mark.parametrize("layout", [cuda_layouts.Q8_0, cuda_layouts.int4(64, False), cuda_layouts.E4M3, Q6_K_LAYOUT])
def test_what_is_compiled_ahead(outputs, inputs, layout, found, monkeypatch):
    """Programs that a GEMM asks for, for every number of rows that is supported."""
    asked = []
    monkeypatch.setattr(packed_gemm, "device_caps", lambda device: found)
    monkeypatch.setattr(jit, "tensor_map", lambda *_: None)
    monkeypatch.setattr(
        jit, "kernel", lambda *a, **sizes: asked.append(jit.variant(a[0], a[2], **sizes)) or (lambda *_, **__: None)
    )
    monkeypatch.setattr(packed_gemm, "gated_activation", lambda y, _: y)
    shape = -(-outputs // 16), inputs // layout.inputs, layout.bytes
    packed = packed_gemm.Packed(torch.empty(shape, dtype=torch.uint8, device="meta"), outputs, layout)
    rows = [1, 2, 4, 5, 8, 9, 16, 33, 64, 65, 128, 200, 256, 257]
    for gate, bias in (("", None), ("silu", None), ("", torch.empty(outputs, dtype=torch.bfloat16, device="meta"))):
        asked.clear()
        supported = [n for n in rows if packed_gemm._plan(n, packed, "", found)[0]]
        for n in supported:
            packed_gemm.linear(torch.empty(n, inputs, dtype=torch.bfloat16, device="meta"), packed, gate, bias)
        assert list(packed_gemm.variants(rows, packed, torch.bfloat16, gate, bias is not None, found)) == asked
        assert supported[:4] == rows[:4] or inputs > 8192  # one to five rows at least
        assert (64 in supported) is (found.has_tma and inputs % 64 == 0)
        assert ({65, 256} <= set(supported)) is (found.hopper and inputs % 64 == 0)
        assert 257 not in supported
