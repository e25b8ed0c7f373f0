import pytest
import torch
from phalanx.kernels.sampling.argmax import argmax, argmax_reference

from ..conftest import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 16, 33, 1000])
def test_argmax(isa, threads, called, dtype, width):
    x = torch.randn(5, width + 3).to(dtype)[:, :width]
    x[1], x[2] = 7, float("-inf")  # the first of equal ones
    x[3, width // 2 :] = 9
    values, ids = argmax(x)
    want_values, want_ids = argmax_reference(x)
    assert torch.equal(values, want_values) and ids.tolist() == [*want_ids.tolist()]
    assert called[1:] == ["choose_f32"]


def test_a_nan_is_passed_over(isa, threads):
    x = torch.arange(40.0).view(1, 40).clone()
    x[0, ::3] = float("nan")
    assert argmax(x)[1].item() == 38
    assert argmax(x.fill_(float("nan")))[1].item() == 0
