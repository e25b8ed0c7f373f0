import pytest
import torch
from phalanx.kernels.activation.activation import xielu, xielu_reference
from transformers.activations import XIELUActivation

from ..conftest import DTYPES, SUFFIXES, close


def test_reference_is_the_paper_s():
    x = torch.linspace(-6, 6, 101)
    theirs = XIELUActivation(alpha_p_init=0.9, alpha_n_init=1.3, dtype=torch.float32)
    close(xielu_reference(x, 0.9, 1.3), theirs(x).detach(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(0, 5), (1, 1), (3, 33), (16, 64)])
def test_xielu(isa, threads, called, dtype, rows, width):
    x = (torch.randn(rows, width) * 4).to(dtype)
    want = xielu_reference(x.float(), 0.9, 1.3)
    close(xielu(x, 0.9, 1.3), want, dtype)
    assert called == [f"xielu_{SUFFIXES[dtype]}"]


def test_what_is_not_finite_stays_so(isa):
    x = torch.ones(40)
    x[3], x[30], x[31] = float("nan"), float("inf"), -1e4
    y = xielu(x, 0.9, 1.3)
    assert y[3].isnan() and y[30] == float("inf") and y.isfinite().sum() == 38
