"""Rotary embedding and the store of keys and values on a GPU against their torch references."""

import pytest
import torch
from phalanx.kernels.rope import rope

from ...devices import require_gpu
from ..gpu import KINDS, NAN, near, poison  # noqa: F401
from .rotating import SIZES, check_rotate

require_gpu()


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize(
    "dim, rotated", [(128, 128), (64, 64), (80, 80), (96, 96), (112, 112), (256, 256), (80, 32), (10, 6)]
)
@pytest.mark.parametrize("tokens, heads, kv_heads", [(0, 2, 1), (1, 4, 4), (37, 8, 2), (5, 16, 1), (300, 5, 3)])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_write(dim, rotated, tokens, heads, kv_heads, with_norms, interleaved, dtype, bound):
    angles = torch.rand(tokens, 1, rotated // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    cos_sin = rope.CosSin(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), interleaved)
    y = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
    weights = torch.randn(2, dim, device="cuda").to(dtype)
    norms = rope.QKNorm(weights[0], weights[1], 1e-6) if with_norms else None
    block_size, blocks = 16, 19
    slots = torch.randperm(blocks * block_size, device="cuda")[:tokens]
    found = []
    for call in (rope.rope_and_store_kv_cuda, rope.rope_and_store_kv_reference):
        q, k, v = y.clone().view(tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
        cache = torch.full((2, blocks, block_size, kv_heads, dim), NAN, device="cuda", dtype=dtype)
        found.append((call(q, rope.CurrentKV(k, v, cos_sin, norms, slots), (cache[0], cache[1])), cache))
    near(found[0][0], found[1][0], bound)
    torch.testing.assert_close(found[0][1], found[1][1], atol=bound, rtol=bound, equal_nan=True)


def test_negative_slots_are_not_written():
    cos_sin = rope.CosSin(torch.ones(3, 1, 8, device="cuda"), torch.zeros(3, 1, 8, device="cuda"))
    q, k, v = torch.randn(3, 3, 8, device="cuda").split(1, 1)
    cache = torch.full((2, 2, 4, 1, 8), NAN, device="cuda")
    slots = torch.tensor([-1, 5, -1], device="cuda")
    rope.rope_and_store_kv(q, rope.CurrentKV(k, v, cos_sin, None, slots), (cache[0], cache[1]))
    assert cache.isnan().sum() == 2 * 7 * 8 and torch.equal(cache[1, 1, 1], v[1])


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_rotate(sizes, dtype, bound):
    check_rotate(*sizes, dtype, bound, "cuda")
