"""The lightning indexer on a GPU, by kernels that Triton has compiled, against the torch references."""

from functools import partial

import pytest
import torch
from phalanx.kernels.attention.topk_select import topk_select
from phalanx.kernels.device import device_caps

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


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_topk(blocks):
    if blocks > 1 and not device_caps(torch.device("cuda", 0)).has_clusters:
        pytest.skip("clusters of blocks are from sm_90 on")
    indexing.check_topk(partial(topk_select, blocks=blocks), "cuda")


def test_topk_of_long_sequences():
    """More scores than blocks keep in shared memory, and sequences of all lengths."""
    scores, tables = torch.randn(6, 200_000, device="cuda"), torch.randperm(12_500, dtype=torch.int32, device="cuda")
    seen = torch.tensor([200_000, 70_000, 2049, 2048, 3, 199_999], dtype=torch.int32, device="cuda")
    tables, want = tables.expand(6, -1), None
    for blocks in (1, 8):
        slots = torch.full((6, 2048), -1, dtype=torch.int32, device="cuda")
        found = slots, torch.empty(6, dtype=torch.int32, device="cuda")
        topk_select(scores, tables, seen, *found, 1, 16, blocks)
        if want is None:
            want = torch.full((6, 2048), -1, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
            indexing.topk_reference(scores.cpu(), tables.cpu(), seen.cpu(), *want, 1, 16)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found, want, strict=True))


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("fp8", [False, True])
def test_attention(dtype, bound, fp8):
    indexing.check_attention(dtype, bound, fp8, "cuda")
