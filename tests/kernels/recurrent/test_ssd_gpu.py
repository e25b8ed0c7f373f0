"""Mamba-2's recurrence on a GPU: Triton's kernels against torch on a CPU."""

import pytest
import torch

from .ssd_steps import BESIDE_DRAFTS, PROMPTS, PUBLISHED, SIZES, Scan, check_chunks, check_norm, check_steps, make_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = [(torch.float32, 2e-4), (torch.bfloat16, 4e-2), (torch.float16, 6e-3)]


@pytest.mark.parametrize("sizes", [*SIZES, PUBLISHED])
@pytest.mark.parametrize("dtype, bound", KINDS)
def test_decode_steps(sizes, dtype, bound):
    for query_len, entries in ((1, 1), (1, 4), (4, 4), (3, 5)):
        check_steps(sizes, dtype, bound, "cuda", query_len, entries)


@pytest.mark.parametrize("dtype, bound", KINDS)
def test_norm(dtype, bound):
    check_norm(dtype, bound, "cuda")


@pytest.mark.parametrize("sizes", [*SIZES, PUBLISHED])
@pytest.mark.parametrize("dtype, bound", KINDS)
def test_chunks(sizes, dtype, bound):
    """Bounds are for sums of 128 products whose operands are rounded."""
    for lens in (PROMPTS, ([300], [300]), ([64, 1000], [128, 1000])):
        torch.manual_seed(0)
        check_chunks(Scan(sizes, make_rows(*lens), dtype), 10 * bound, "cuda")
    check_chunks(Scan(sizes, make_rows(*BESIDE_DRAFTS, query_len=4), dtype), 8 * bound, "cuda")


def test_a_step_with_prompts_beside_decoding_sequences():
    torch.manual_seed(0)
    scan = Scan(PUBLISHED, make_rows([1, 1, 100, 65], [7, 1, 300, 65]))
    there = scan.on("cuda")
    for got, wanted in zip(there.run(), scan.run(), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, atol=2e-3, rtol=2e-3)
