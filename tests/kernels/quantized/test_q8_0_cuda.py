"""q8_0's layout on GPUs, and its kernels thread by thread on a CPU."""

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.quantized import q8_0_cuda
from phalanx.kernels.quantized.q8_0_cuda import GemvConfig, TileConfig, WgmmaConfig

from .. import cuda_model
from ..cuda_model import Box

H200 = DeviceCaps(132, "sm_90a", True, True, True)


def make(outputs, inputs, seed=0):
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=draw)
    return codes, (torch.rand(outputs, inputs // 32, generator=draw) / 64 - 1 / 128).half()


def wide(codes, scales):
    return codes.double() * scales.double().repeat_interleave(32, 1)


@pytest.mark.parametrize("outputs, inputs", [(16, 32), (1, 32), (48, 96), (37, 4096)])
def test_pack_and_back(outputs, inputs):
    codes, scales = make(outputs, inputs)
    packed = q8_0_cuda.pack(codes, scales)
    assert packed.pieces.shape == (-(-outputs // 16), inputs // 32, 544) and packed.inputs == inputs
    assert packed.pieces.is_contiguous()
    found = q8_0_cuda.unpack(packed)
    assert torch.equal(found[0], codes) and torch.equal(found[1], scales)


def test_where_a_lane_finds_its_codes():
    """As the head of q8_0.cuh says, and as the tensor cores' first operand asks for (PTX ISA, mma.m16n8k16)."""
    codes, scales = make(32, 96)
    packed = q8_0_cuda.pack(codes, scales)
    for strip in range(2):
        for group in range(3):
            piece = packed.pieces[strip, group]
            for lane in range(32):
                g, t = divmod(lane, 4)
                words = (piece[lane * 16 : lane * 16 + 16].view(4, 4).int() - 128).tolist()
                for s in range(2):
                    for h in range(2):
                        row = codes[strip * 16 + g + 8 * h, group * 32 + 16 * s :]
                        want = [row[2 * t + i].item() for i in (0, 8, 1, 9)]
                        assert words[2 * s + h] == want
                pair = piece[512 + 4 * g : 516 + 4 * g].view(torch.float16)
                assert torch.equal(pair, scales[[strip * 16 + g, strip * 16 + g + 8], group])


def test_what_cannot_be_packed():
    codes, scales = make(4, 64)
    with pytest.raises(ValueError, match="one scale for each 32 inputs"):
        q8_0_cuda.pack(codes, scales[:, :1])
    with pytest.raises(ValueError, match="one scale for each 32 inputs"):
        q8_0_cuda.pack(codes[:, :40], scales)


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Kernels run in the model, in few stages; new tensors hold NaN. Gives the sources that were launched."""
    libraries, sources = {}, []

    def kernel(source, name, dtype, shared=0, **sizes):
        variant = jit.variant(source, dtype, **sizes)
        if variant not in libraries:
            folder = tmp_path / str(len(libraries))
            folder.mkdir()
            libraries[variant] = cuda_model.build(source, {"T": dtype, **sizes}, folder)

        def launch(grid, threads, *args, shared=0, cluster=1):
            assert cluster == 1, "the model has none"
            sources.append(source)
            weights = next(a for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.uint8)
            cuda_model.launch(libraries[variant], grid, threads, args, weights, seed=len(sources))

        return launch

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(jit, "tensor_map", lambda start, rows, columns, height, _: Box(start, rows, columns, height))
    monkeypatch.setattr(q8_0_cuda, "device_caps", lambda device: H200._replace(num_sms=2))
    monkeypatch.setattr(q8_0_cuda, "MOST_STAGES", 3)
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


def near(got, want):
    assert got.shape == want.shape and got.isfinite().all()
    assert ((got.double() - want).norm() / want.norm()).item() < 3e-3


GEMVS = [
    (1, 48, 256, GemvConfig(1, 8, 2)),
    (2, 40, 4096, GemvConfig(1, 4, 3)),
    (3, 33, 1056, GemvConfig(2, 4, 2)),
    (8, 16, 32, GemvConfig(1, 8, 2)),
    (5, 80, 2336, GemvConfig(2, 4, 2)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize("rows, outputs, inputs, way", GEMVS)
def test_gemv(rows, outputs, inputs, way, dtype, launched):
    codes, scales = make(outputs, inputs)
    packed, (x, bias) = q8_0_cuda.pack(codes, scales), inputs_of(rows, outputs, inputs, dtype)
    want = x.double() @ wide(codes, scales).T
    near(q8_0_cuda.gemv(x, packed, way), want)
    near(q8_0_cuda.gemv(x, packed, way, bias=bias), want + bias.double())
    assert launched == ["quantized_gemv"] * 2


@pytest.mark.parametrize("rows, outputs, inputs", [(1, 96, 256), (4, 32, 1088)])
def test_gated_gemv(rows, outputs, inputs, launched):
    codes, scales = make(outputs, inputs)
    packed, (x, bias) = q8_0_cuda.pack(codes, scales), inputs_of(rows, outputs, inputs, torch.bfloat16)
    want = x.double() @ wide(codes, scales).T + bias.double()
    near(q8_0_cuda.gemv(x, packed, GemvConfig(2, 4, 2), "silu", bias), gate(want, x.dtype))


TILES = [
    (3, 112, 256, TileConfig(32, 64)),
    (8, 200, 1024, TileConfig(48, 128)),
    (16, 264, 512, TileConfig(112, 64)),
    (17, 176, 384, TileConfig(48, 128)),
    pytest.param(13, 96, 1024, TileConfig(64, 256), marks=pytest.mark.long),
    pytest.param(32, 130, 512, TileConfig(64, 64), marks=pytest.mark.long),
    pytest.param(64, 64, 512, TileConfig(32, 128), marks=pytest.mark.long),
]


@pytest.mark.parametrize("rows, outputs, inputs, cut", TILES)
def test_gemm(rows, outputs, inputs, cut, launched):
    """Blocks have several tiles, and the last one is not whole."""
    for dtype in (torch.bfloat16, torch.float16)[: 1 + (rows < 9)]:
        codes, scales = make(outputs, inputs)
        packed, (x, bias) = q8_0_cuda.pack(codes, scales), inputs_of(rows, outputs, inputs, dtype)
        want = x.double() @ wide(codes, scales).T + bias.double()
        for _ in range(2):
            near(q8_0_cuda.gemm(x, packed, cut, bias=bias), want)


@pytest.mark.parametrize(
    "rows, outputs, inputs, cut", [(9, 192, 256, TileConfig(64, 64)), (30, 160, 256, TileConfig(96, 128))]
)
def test_gated_gemm(rows, outputs, inputs, cut, launched):
    codes, scales = make(outputs, inputs)
    packed, (x, bias) = q8_0_cuda.pack(codes, scales), inputs_of(rows, outputs, inputs, torch.bfloat16)
    want = x.double() @ wide(codes, scales).T + bias.double()
    near(q8_0_cuda.gemm(x, packed, cut, "silu", bias), gate(want, x.dtype))


@pytest.mark.parametrize(
    "rows, outputs, inputs, gated, cut, dtype",
    [
        (33, 150, 512, "", WgmmaConfig(128, 64, 64, 1), torch.bfloat16),
        (131, 288, 256, "silu", WgmmaConfig(192, 128, 64, 1), torch.float16),
    ],
)
def test_wgmma(rows, outputs, inputs, gated, cut, dtype, launched):
    """Neither the last tile of outputs nor the last one of rows is whole, and the ring goes round."""
    codes, scales = make(outputs, inputs)
    packed, (x, bias) = q8_0_cuda.pack(codes, scales), inputs_of(rows, outputs, inputs, dtype)
    want = x.double() @ wide(codes, scales).to(dtype).double().T + bias.double()
    near(q8_0_cuda.wgmma(x, packed, cut, gated, bias), gate(want, dtype) if gated else want)
    assert launched == ["quantized_wgmma"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, inputs", [(16, 32), (40, 1184)])
def test_dequantize(outputs, inputs, dtype, launched):
    """Bit for bit: each product is rounded once."""
    codes, scales = make(outputs, inputs)
    want = wide(codes, scales).float().to(dtype)
    assert torch.equal(q8_0_cuda.dequantize(q8_0_cuda.pack(codes, scales), dtype), want)


@pytest.mark.parametrize(
    "found", [H200, DeviceCaps(148, "sm_100", True, True, False), DeviceCaps(108, "sm_80", *[False] * 3)]
)
@pytest.mark.parametrize("outputs, inputs", [(6144, 4096), (28672, 4096), (4096, 14336), (1000, 96), (40, 14336)])
def test_what_is_compiled_ahead(outputs, inputs, found, monkeypatch):
    """What a product asks for, for every number of rows that is supported."""
    asked = []
    monkeypatch.setattr(q8_0_cuda, "device_caps", lambda device: found)
    monkeypatch.setattr(jit, "tensor_map", lambda *_: None)
    monkeypatch.setattr(
        jit, "kernel", lambda *a, **sizes: asked.append(jit.variant(a[0], a[2], **sizes)) or (lambda *_, **__: None)
    )
    monkeypatch.setattr(q8_0_cuda, "gated_activation", lambda y, _: y)
    pieces = torch.empty(-(-outputs // 16), inputs // 32, 544, dtype=torch.uint8, device="meta")
    packed, rows = q8_0_cuda.Packed(pieces, outputs), [1, 2, 4, 5, 8, 9, 16, 33, 64, 65, 128, 200, 256, 257]
    for gate, bias in (("", None), ("silu", None), ("", torch.empty(outputs, dtype=torch.bfloat16, device="meta"))):
        asked.clear()
        supported = [n for n in rows if q8_0_cuda._plan(n, packed, "", found)[0]]
        for n in supported:
            q8_0_cuda.linear(torch.empty(n, inputs, dtype=torch.bfloat16, device="meta"), packed, gate, bias)
        assert list(q8_0_cuda.variants(rows, packed, torch.bfloat16, gate, bias is not None, found)) == asked
        assert supported[:4] == rows[:4] or inputs > 8192, "one to five rows at least"
        assert (64 in supported) is (found.has_tma and inputs % 64 == 0)
        assert ({65, 256} <= set(supported)) is (found.hopper and inputs % 64 == 0)
        assert 257 not in supported
