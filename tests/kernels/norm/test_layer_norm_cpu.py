import pytest
import torch
from phalanx.kernels.norm.norm import add_layer_norm, layer_norm, layer_norm_reference
from torch.nn.functional import layer_norm as torch_layer_norm

from ..conftest import DTYPES, close

PARAMETERS = ["", "weight", "bias", "weight bias"]


def affine(which, *shape, dtype=torch.float32):
    return tuple(torch.randn(shape).to(dtype) if name in which.split() else None for name in ("weight", "bias"))


def wide(weight, bias):
    return tuple(None if x is None else x.float() for x in (weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(0, 7), (1, 1), (3, 33), (5, 64), (70, 100)])
@pytest.mark.parametrize("which", PARAMETERS)
def test_layer_norm(isa, threads, called, dtype, rows, size, which):
    x = (torch.randn(rows, size) * 5 + 2).to(dtype)
    weight, bias = affine(which, size, dtype=dtype)
    before = x.clone()
    want = torch_layer_norm(x.float(), (size,), *wide(weight, bias), 1e-5)
    close(layer_norm(x, weight, bias, 1e-5), want, dtype)
    assert torch.equal(x, before) and len(called) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 33), (5, 64)])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("which", PARAMETERS)
def test_add_layer_norm(isa, threads, called, dtype, rows, size, more, which):
    x, residual, other = torch.randn(3, rows, size).to(dtype)
    weight, bias = affine(which, size, dtype=dtype)
    want = residual + (x + other if more else x)  # torch rounds each sum, as is promised
    normed, stream = add_layer_norm(x, residual, weight, bias, 1e-5, other if more else None)
    assert torch.equal(stream, want) and normed is x and stream is residual
    close(normed, torch_layer_norm(want.float(), (size,), *wide(weight, bias), 1e-5), dtype)
    assert len(called) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(10,), (3, 10)])
def test_heads_in_place_in_a_wider_tensor(isa, threads, called, dtype, shape):
    """One weight for all heads, or one for each."""
    x = torch.randn(5, 7, 10).to(dtype)[:, 2:5]
    weight, bias = affine("weight bias", *shape, dtype=dtype)
    want = torch_layer_norm(x.float(), (10,)) * weight.float() + bias.float()
    close(layer_norm(x, weight, bias, 1e-5), want, dtype)
    close(layer_norm_reference(x, weight, bias, 1e-5), want, dtype)
    assert len(called) == 1


def test_a_large_mean_costs_no_digits(isa):
    x = torch.randn(4, 100) + 3000
    want = torch_layer_norm(x.double(), (100,)).float()
    torch.testing.assert_close(layer_norm(x, None, None, 1e-5), want, atol=2e-3, rtol=1e-3)


def test_a_nan_stays_in_its_row(isa):
    x = torch.randn(2, 8)
    x[1, 3] = float("nan")
    y = layer_norm(x, torch.ones(8), None, 1e-5)
    assert y[0].isfinite().all() and y[1].isnan().all()


def test_torch_does_the_others(called):
    """f16, weights of another type, strided elements."""
    x = torch.randn(3, 8)
    want = torch_layer_norm(x, (8,))
    close(layer_norm(x.half(), None, None, 1e-5), want, torch.float16, 2e-3, 2e-3)
    assert layer_norm(x.bfloat16(), torch.ones(8), None, 1e-5).dtype == torch.bfloat16
    close(layer_norm(x.T.contiguous().T, None, None, 1e-5), want, torch.float32)
    residual, other = torch.randn(2, 3, 8).half()
    normed, stream = add_layer_norm(x.half(), residual.clone(), None, None, 1e-5, other)
    assert torch.equal(stream, residual + (x.half() + other)) and called == []
    assert torch.equal(normed, layer_norm_reference(stream, None, None, 1e-5))
