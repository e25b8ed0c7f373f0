"""RMS norms in e4m3 on a GPU: bit for bit what linears would make of the norms."""

import pytest
import torch
from phalanx.kernels.device import device_caps
from phalanx.kernels.norm import norm
from phalanx.kernels.quantized import e4m3_rows

from ...devices import require_gpu
from ..gpu import poison  # noqa: F401

require_gpu()
if not device_caps(torch.device("cuda", 0)).has_pdl:
    pytest.skip("needs sm_90 or later, which converts to e4m3", allow_module_level=True)


def check(found, want):
    """Against the kernel of its own, and the reference."""
    (rows, stream), (normed, total) = found, want
    assert torch.equal(stream, total) and rows.dtype == normed.dtype
    codes, scales, _ = e4m3_rows.encode(normed)
    assert torch.equal(rows.codes, codes) and torch.equal(rows.scales, scales)
    codes, scales = e4m3_rows.encode_reference(normed)
    assert torch.equal(rows.codes, codes)
    torch.testing.assert_close(rows.scales, scales, rtol=1e-6, atol=0)  # torch multiplies with 448's reciprocal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [128, 2048, 4096, 5120, 7168, 16384])
@pytest.mark.parametrize("rows", [0, 1, 33, 256, 1000])
def test_codes_are_those_of_the_norm(rows, size, dtype):
    x, residual = torch.randn(2, rows, size, device="cuda").to(dtype).unbind()
    weight = torch.randn(size, device="cuda").to(dtype)
    x[::7] *= 50
    want = norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    check(e4m3_rows.sum_add_rms_norm(x.unsqueeze(1), residual, weight, 1e-5), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, terms, size", [(33, 8, 2048), (256, 6, 5120), (100, 2, 384)])
@pytest.mark.parametrize("more", ["", "rows", "bias"])
def test_sums_of_terms(rows, terms, size, more, dtype):
    given, weight = torch.randn(rows, terms, size, device="cuda").to(dtype), torch.randn(size, device="cuda").to(dtype)
    residual, other = torch.randn(2, rows, size, device="cuda").to(dtype).unbind()
    added = {"": None, "rows": other, "bias": other[0]}[more]
    want = norm.sum_add_rms_norm(given, residual.clone(), weight, 1e-5, added)
    check(e4m3_rows.sum_add_rms_norm(given, residual, weight, 1e-5, added), want)


def test_rows_of_zeros_are_zeros():
    x, weight = torch.zeros(33, 1, 4096, device="cuda").bfloat16(), torch.randn(4096, device="cuda").bfloat16()
    rows, _ = e4m3_rows.sum_add_rms_norm(x, torch.zeros_like(x[:, 0]), weight, 1e-5)
    assert not (rows.codes & 0x7F).any() and not rows.scales.any()
