"""Norms on GPUs against their torch reference."""

import pytest
import torch
from phalanx.kernels.norm import norm

from ...devices import require_gpu
from ..gpu import KINDS, near, poison  # noqa: F401

require_gpu()


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, size", [(0, 64), (1, 1), (3, 33), (17, 64), (5, 4096), (2, 8192), (3, 1000), (2, 5120)])
def test_norms(rows, size, dtype, bound):
    x, residual, weight = (torch.randn(s, device="cuda").to(dtype) for s in ((rows, size), (rows, size), (size,)))
    near(norm.rms_norm(x, weight, 1e-5), norm.rms_norm_reference(x, weight, 1e-5), bound)
    want = norm.add_rms_norm_reference(x.clone(), residual.clone(), weight, 1e-5)
    got = norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    near(got[0], want[0], bound)
    assert torch.equal(got[1], want[1])
    other = torch.randn(rows, size, device="cuda").to(dtype)
    want = norm.add_rms_norm_reference(x + other, residual.clone(), weight, 1e-5)
    for odd in range(4):  # none of them, or one, where vectors do not fit
        held = [torch.empty(y.numel() + 1, device="cuda", dtype=dtype)[i == odd :][: y.numel()].view_as(y).copy_(y)
                for i, y in enumerate((weight, residual, other))]  # fmt: skip
        got = norm.add_rms_norm(x.clone(), held[1], held[0], 1e-5, held[2])
        near(got[0], want[0], bound)
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, size", [(0, 64), (1, 1), (3, 33), (17, 64), (5, 3584), (2, 8192), (2, 5120)])
def test_norm_add_norm(rows, size, dtype, bound):
    """A sublayer's own norm, the addition and the next norm as one kernel, whether vectors fit or not."""
    x, residual = torch.randn(2, rows, size, device="cuda").to(dtype).unbind()
    post, weight = torch.randn(2, size, device="cuda").to(dtype).unbind()
    apart = norm.rms_norm(x, post, 1e-6)
    want = norm.add_rms_norm_reference(apart, residual.clone(), weight, 1e-5)
    for odd in range(2):
        held = torch.empty(size + 1, device="cuda", dtype=dtype)[odd:][:size].copy_(post)
        got = norm.norm_add_norm(x.clone(), held, 1e-6, residual.clone(), weight, 1e-5)
        near(got[0], want[0], bound)
        near(got[1], want[1], bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, terms, size", [(0, 2, 64), (1, 1, 1), (3, 5, 33), (17, 8, 2048), (5, 6, 5120)])
def test_sums_of_terms(rows, terms, size, dtype, bound):
    given, weight = torch.randn(rows, terms, size, device="cuda").to(dtype), torch.randn(size, device="cuda").to(dtype)
    residual, other = torch.randn(2, rows, size, device="cuda").to(dtype).unbind()
    x = given.float().sum(1).to(dtype)
    for more in (None, other, torch.randn(size, device="cuda").to(dtype)):
        want = norm.add_rms_norm(x.clone() if more is None else x + more, residual.clone(), weight, 1e-5)
        for made, wanted in zip(
            norm.sum_add_rms_norm(given.clone(), residual.clone(), weight, 1e-5, more), want, strict=True
        ):
            near(made, wanted, 2 * bound)  # a sum in another order may round another way


def test_norm_of_strided_heads():
    x, weight = torch.randn(5, 7, 64, device="cuda").half(), torch.randn(64, device="cuda").half()
    near(norm.rms_norm(x[:, 2:5], weight, 1e-6), norm.rms_norm_reference(x[:, 2:5], weight, 1e-6), 2e-3)
    wide = torch.randn(6, 100, device="cuda")
    near(
        norm.rms_norm(wide[:, 1:34], wide[0, :33], 1e-6),
        norm.rms_norm_reference(wide[:, 1:34], wide[0, :33], 1e-6),
        1e-5,
    )


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, size", [(0, 64), (1, 1), (3, 33), (17, 64), (5, 4096), (2, 8192), (3, 1000), (2, 5120)])
@pytest.mark.parametrize("weighted, biased", [(True, True), (True, False), (False, False), (False, True)])
def test_layer_norms(rows, size, weighted, biased, dtype, bound):
    x, residual, other = ((torch.randn(3, rows, size, device="cuda") + 2).to(dtype)).unbind()
    weight, bias = torch.randn(2, size, device="cuda").to(dtype).unbind()
    weight, bias = weight if weighted else None, bias if biased else None
    near(norm.layer_norm(x, weight, bias, 1e-5), norm.layer_norm_reference(x, weight, bias, 1e-5), bound)
    for more in (None, other):
        total = x if more is None else x + more
        want = norm.add_layer_norm_reference(total, residual.clone(), weight, bias, 1e-5)
        for odd in range(4):  # none of them, or one, where vectors do not fit
            held = [y if y is None else
                    torch.empty(y.numel() + 1, device="cuda", dtype=dtype)[i == odd :][: y.numel()].view_as(y).copy_(y)
                    for i, y in enumerate((weight, bias, residual))]  # fmt: skip
            got = norm.add_layer_norm(x.clone(), held[2], held[0], held[1], 1e-5, more)
            near(got[0], want[0], bound)
            assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (3, 33), (33,)])
def test_layer_norm_of_strided_heads(shape, dtype, bound):
    x = torch.randn(5, 7, shape[-1], device="cuda").to(dtype)[:, 2:5]
    weight, bias = torch.randn(2, *shape, device="cuda").to(dtype).unbind()
    near(norm.layer_norm(x, weight, bias, 1e-5), norm.layer_norm_reference(x, weight, bias, 1e-5), bound)
