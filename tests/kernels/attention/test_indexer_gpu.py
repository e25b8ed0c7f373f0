"""The lightning indexer on a GPU, by kernels that Triton has compiled, against the torch references."""

import pytest
import torch
from phalanx.kernels.attention.topk_select import topk_select

from ...devices import require_gpu
from . import indexing
from .indexing import DEEPSEEK, INDEXES, STEPS

require_gpu()
KINDS = [(torch.float32, 1e-5), (torch.bfloat16, 2.5e-2), (torch.float16, 4e-3)]
LONG = (1, [1, 1, 1, 30], [5000, 0, 257, 20000])


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("sizes", [*INDEXES, DEEPSEEK])
@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("fp8", [False, True])
def test_store(sizes, dtype, bound, fp8):
    for interleaved in (False, True):
        for bias in (False, True):
            indexing.check_store(sizes, interleaved, dtype, bound, fp8, "cuda", bias)


@pytest.mark.parametrize("sizes", [*INDEXES, DEEPSEEK])
@pytest.mark.parametrize("dtype", [dtype for dtype, _ in KINDS])
@pytest.mark.parametrize("fp8", [False, True])
def test_choice(sizes, dtype, fp8):
    for step in STEPS if sizes != DEEPSEEK else (LONG,):
        indexing.check_choice(sizes, step, dtype, fp8, "cuda")


def test_topk():
    indexing.check_topk(topk_select, "cuda")


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("fp8", [False, True])
def test_attention(dtype, bound, fp8):
    indexing.check_attention(dtype, bound, fp8, "cuda")
