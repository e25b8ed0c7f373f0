"""What tests of kernels on GPUs share."""

import pytest
import torch

KINDS = [(torch.float32, 3e-6), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)]  # dtypes and how near results are
NAN = float("nan")


def near(got, want, bound):
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), atol=bound, rtol=bound)


@pytest.fixture(autouse=True)
def poison():
    """Fresh memory holds NaN: what a kernel does not write shows."""
    torch.manual_seed(0)
    held = [torch.full((n,), NAN, device="cuda") for n in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)]
    del held
    yield
    torch.cuda.synchronize()
