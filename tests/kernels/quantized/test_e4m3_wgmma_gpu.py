"""FP8 by tensor cores of 8 bits, against f64 of the same codes: every config, gates, biases, odd sizes."""

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.quantized import e4m3_rows, e4m3_wgmma, floats, linear, packed_gemm
from torch.nn.functional import silu

from ...devices import needs_hopper, require_gpu
from ..gpu import NAN, poison  # noqa: F401
from . import floats_cases
from .floats_cases import rounded

require_gpu()
E4M3 = torch.float8_e4m3fn
# Bounds of the norm of the error: outputs in 16 bits, and what tensor cores drop of sums of 128 to 512.
BOUND = {torch.bfloat16: 2**-8, torch.float16: 2**-9}


def make(outputs, inputs, unit=128):
    plain = floats_cases.make(outputs, inputs, unit)
    packed = floats.pack_for_device(floats.pack(plain.codes.cuda(), plain.scales.cuda()))
    return packed, linear.dequantize(plain).double().cuda()


def rows_of(rows, inputs, dtype):
    """x, and NaN behind it; some rows much larger than others."""
    room = torch.full((rows * inputs + (1 << 14),), NAN, device="cuda", dtype=dtype)
    x = room[: rows * inputs].view(rows, inputs).copy_(torch.randn(rows, inputs, device="cuda"))
    x[::7] *= 50 if dtype == torch.bfloat16 else 5  # a gate times an up is to stay in f16
    return x


def check(found, want, about, gated):
    apart = ((found[0].double() - want).norm(dim=1) / want.norm(dim=1)).max().item()
    assert apart < BOUND[found[0].dtype] * (1 + gated), (about, apart)  # both factors are rounded, too
    assert all(torch.equal(y, found[0]) for y in found), about


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, inputs", [(2, 128), (65, 4096), (257, 14336), (34, 36864)])
def test_rows(rows, inputs, dtype):
    x = rows_of(rows, inputs, dtype)
    x[0] = 0
    codes, scales, _ = e4m3_rows.encode(x)
    want, by = e4m3_rows.encode_reference(x)
    torch.testing.assert_close(scales, by, rtol=1e-6, atol=0)
    apart = (codes.view(E4M3).float() - want.view(E4M3).float()).abs() / want.view(E4M3).float().abs().clamp(1)
    assert apart.max() <= 1 / 8 and (apart > 0).float().mean() < 1e-4  # a quotient that rounds another way


@needs_hopper
@pytest.mark.parametrize("tile, clusters", e4m3_wgmma.TILES)
@pytest.mark.parametrize(
    "outputs, inputs, unit, gate, dtype",
    [
        (1344, 2048, 128, "silu", torch.bfloat16),
        (5003, 1024, 128, "", torch.float16),
        (1344, 4096, 1024, "silu", torch.bfloat16),
        (5003, 2048, 2048, "", torch.float16),
        (1344, 3584, 512, "silu", torch.bfloat16),
        (1344, 1792, 256, "", torch.float16),
    ],
)
def test_every_config(outputs, inputs, unit, gate, dtype, tile, clusters):
    packed, weight = make(outputs, inputs, unit)
    alike = packed.layout.alike
    bias = torch.randn(outputs, device="cuda").to(dtype)
    every = e4m3_wgmma.configs(257, inputs, alike, bool(gate))
    configs = [config for config in every if (config.outputs, config.rows, config.n) == tile]
    wanted = [split for split, _ in clusters if inputs % (split * 512) == 0]  # 512: the run of most tiles
    assert len(configs) >= len(wanted) - 1
    sizes = [packed_gemm.sizes(0, inputs, config, gate, True, packed.layout) for config in configs]
    jit.compile_ahead([jit.variant("e4m3_wgmma", dtype, **one) for one in sizes], torch.device("cuda"))
    for rows in (5, 65, 129, 256, 600, 2500):
        x = rows_of(rows, inputs, dtype)
        want = rounded(x) @ weight.T + bias.double()
        if gate:
            first, second = want.to(dtype).double().chunk(2, 1)
            want = silu(first) * second
        for config in configs:
            found = [packed_gemm.gemm(e4m3_rows.encode(x), packed, config, gate, bias) for _ in range(3)]
            check(found, want, (config, rows), bool(gate))


@needs_hopper
@pytest.mark.parametrize(
    "outputs, inputs, unit, gate",
    [(6144, 4096, 128, ""), (28672, 4096, 2048, "silu"), (4096, 14336, 128, ""), (4096, 14336, 1024, "")],
)
def test_linears_of_a_model(outputs, inputs, unit, gate):
    packed, weight = make(outputs, inputs, unit)
    for rows in (33, 64, 128, 256, 2048):
        x = rows_of(rows, inputs, torch.bfloat16)
        assert packed_gemm.takes_e4m3(x, packed)
        want = rounded(x) @ weight.T
        if gate:
            first, second = want.to(x.dtype).double().chunk(2, 1)
            want = silu(first) * second
        check([linear.linear(x, packed, gate) for _ in range(10)], want, rows, bool(gate))
