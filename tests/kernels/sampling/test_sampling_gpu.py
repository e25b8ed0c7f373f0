"""The end of a step on a GPU, and what the next begins with, against their torch references."""

import pytest
import torch
from phalanx.kernels.sampling import argmax, decode_inputs, logits

from ...devices import require_gpu
from ..gpu import NAN, poison  # noqa: F401
from . import test_decode_inputs

require_gpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, width", [(0, 8), (1, 1), (1, 128256), (3, 33), (300, 1000), (40, 32000), (700, 128)])
def test_argmax(rows, width, dtype):
    """bf16 has many equal ones: the first counts. -inf and NaN are in between; twice, as blocks count each other."""
    x = torch.randn(rows, width, device="cuda").to(dtype)
    x[:, width // 2 :: 3] = float("-inf")
    for _ in range(2):
        values, ids = argmax.argmax(x)
        want, where = (y.cuda() for y in argmax.argmax_reference(x.cpu()))
        assert torch.equal(values, want) and torch.equal(ids, where)
    if width > 8:
        x[:, 5] = NAN
        kept = x.clone()
        kept[:, 5] = float("-inf")
        assert torch.equal(argmax.argmax(x)[1], argmax.argmax_reference(kept.cpu())[1].cuda())
        assert (argmax.argmax(torch.full_like(x, float("-inf")))[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width, present", [(4096, 4096), (4096, 4001), (37, 30)])
@pytest.mark.parametrize("scale, softcap", [(1.0, 0.0), (0.125, 0.0), (3.0, 2.5)])
def test_finish_logits(dtype, width, present, scale, softcap):
    x = (torch.randn(5, width, device="cuda") * 20).to(dtype)
    want = logits.finish_logits_reference(x.clone(), present, scale, softcap)
    torch.testing.assert_close(logits.finish_logits(x, present, scale, softcap), want)
    assert logits.finish_logits(x[:0], present, scale, softcap).shape == (0, width)


def test_inputs_of_a_decode_step():
    for query_len in (1, 4):
        test_decode_inputs.check(decode_inputs.decode_inputs, "cuda", query_len)
