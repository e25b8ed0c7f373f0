import pytest
import torch
from phalanx.kernels.norm.norm import add_rms_norm, norm_add_norm, rms_norm, rms_norm_reference

from ..conftest import DTYPES, close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 33), (5, 64), (70, 100)])
def test_rms_norm(isa, threads, called, dtype, rows, size):
    x, weight = (torch.randn(rows, size) * 5).to(dtype), torch.randn(size).to(dtype)
    before = x.clone()
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x.float(), weight.float(), 1e-5), dtype)
    assert torch.equal(x, before) and len(called) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_parts_of_rows(isa, threads, called, dtype):
    x, weight = torch.randn(5, 100).to(dtype)[:, 20:53], torch.randn(33).to(dtype)
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x.float(), weight.float(), 1e-5), dtype)
    assert len(called) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 1), (3, 33), (5, 64)])
@pytest.mark.parametrize("more", [False, True])
def test_add_rms_norm(isa, threads, called, dtype, rows, size, more):
    x, residual, other = torch.randn(3, rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    want = residual + (x + other if more else x)  # torch rounds each sum, as is promised
    normed, stream = add_rms_norm(x, residual, weight, 1e-5, other if more else None)
    assert torch.equal(stream, want) and normed is x and stream is residual
    close(normed, rms_norm_reference(want.float(), weight.float(), 1e-5), dtype)
    assert len(called) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_add_norm(isa, dtype):
    x, residual = torch.randn(2, 5, 64).to(dtype)
    post, weight = torch.randn(2, 64).to(dtype)
    want = residual + rms_norm(x, post, 1e-6)
    normed, stream = norm_add_norm(x, post, 1e-6, residual, weight, 1e-5)
    assert torch.equal(stream, want)
    close(normed, rms_norm_reference(want.float(), weight.float(), 1e-5), dtype)


def test_a_nan_stays_in_its_row(isa):
    x = torch.ones(2, 8)
    x[1, 3] = float("nan")
    y = rms_norm(x, torch.ones(8), 1e-5)
    assert y[0].isfinite().all() and y[1].isnan().all()


def test_weights_of_another_type_are_left_to_torch(called):
    assert rms_norm(torch.ones(2, 8).bfloat16(), torch.ones(8), 1e-5).dtype == torch.bfloat16
    assert called == []
