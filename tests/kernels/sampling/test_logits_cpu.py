import pytest
import torch
from phalanx.kernels.sampling.logits import finish_logits, finish_logits_reference

from ..conftest import DTYPES, SUFFIXES, close

NONE = float("-inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, padding", [(1, 0), (5, 1), (64, 0), (100, 33), (40, 40)])
@pytest.mark.parametrize("scale, softcap", [(1.0, 0.0), (0.125, 0.0), (1.0, 30.0), (3.0, 2.5)])
def test_finish_logits(isa, threads, called, dtype, width, padding, scale, softcap):
    x = (torch.randn(3, width) * 20).to(dtype)
    present = width - padding
    want = x.double() * scale
    want = softcap * torch.tanh(want / softcap) if softcap else want
    want[:, present:] = NONE
    for finish in (finish_logits, finish_logits_reference):
        y = x.clone()
        assert finish(y, present, scale, softcap) is y
        close(y, want, dtype)
    changes = padding or scale != 1 or softcap
    assert called == ([f"finish_{SUFFIXES[dtype]}"] if changes else [])


def test_no_rows():
    assert finish_logits(torch.empty(0, 8), 8, 2.0, 30.0).shape == (0, 8)
