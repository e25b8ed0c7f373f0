"""Attention to chosen blocks on a GPU against that on a CPU, in f32."""

import pytest
import torch
from phalanx.kernels.attention.block_sparse import block_sparse_attention
from phalanx.kernels.rope.rope import KVCache

from ...devices import require_gpu
from .decoding import check_listed
from .indexing import STEPS
from .latents import to
from .test_block_sparse import CHOICES, PARAMS, ROTATED, make_step

require_gpu()


@pytest.mark.parametrize("blocks", CHOICES)
@pytest.mark.parametrize("step", STEPS)
def test_attention(blocks, step):
    torch.manual_seed(0)
    rows, q, cache, index_q, index_keys = make_step(step)
    given = PARAMS, blocks, ROTATED
    want = block_sparse_attention(q, cache, index_q, index_keys, rows, *given)
    rows.scratch = {}
    q, keys, values, index_q, index_keys = (x.cuda() for x in (q, *cache[:2], index_q, index_keys))
    found = block_sparse_attention(q, KVCache(keys, values), index_q, index_keys, to(rows, "cuda"), *given)
    torch.testing.assert_close(found.cpu(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 2.5e-2)])
def test_lists(dtype, bound):
    torch.manual_seed(0)
    check_listed(dtype, bound, "cuda")
