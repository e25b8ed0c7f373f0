import pytest
import torch
from phalanx.kernels.rope.rope import (
    CurrentKV,
    QKNorm,
    apply_rotary,
    cos_sin_reference,
    rope_and_store_kv,
    rope_and_store_kv_reference,
)

from ..conftest import DTYPES, close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, dim, rotated", [(4, 2, 8, 8), (3, 1, 10, 4), (2, 2, 64, 64), (5, 1, 120, 80)]
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_store_kv(isa, threads, called, dtype, heads, kv_heads, dim, rotated, normed, interleaved):
    rows, slots = 3, torch.tensor([7, 0, 11])
    wide = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    cos_sin = cos_sin_reference(torch.randn(20, 2, rotated // 2), torch.randint(20, (rows,)))
    cos_sin = cos_sin._replace(interleaved=interleaved)
    norms = QKNorm(torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-6) if normed else None
    found = []
    for write, kind in ((rope_and_store_kv_reference, torch.float32), (rope_and_store_kv, dtype)):
        caches = torch.full((2, 4, 3, kv_heads, dim), float("nan"), dtype=kind)
        q, k, v = wide.to(kind).clone().split([heads, kv_heads, kv_heads], 1)
        weights = norms and QKNorm(norms.q_weight.to(kind), norms.k_weight.to(kind), norms.eps)
        found.append((write(q, CurrentKV(k, v, cos_sin, weights, slots), tuple(caches)), *caches))
    for want, got in zip(*found, strict=True):
        close(got, want, dtype, atol=1e-5 if dtype == torch.float32 else 6e-2)
    assert len(called) == 1


def test_interleaved_pairs_are_neighbours():
    """The paper's (34): (x0, x1) → (x0 cos - x1 sin, x1 cos + x0 sin), and so on."""
    x, (cos, sin) = torch.randn(1, 1, 6), torch.randn(1, 2, 2).unbind(1)
    cos_sin = cos_sin_reference(torch.stack((cos, sin), 1), torch.zeros(1, dtype=torch.int64))
    even, odd = x[..., 0:4:2], x[..., 1:4:2]
    wanted = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    found = apply_rotary(x, cos_sin._replace(interleaved=True))
    assert torch.allclose(found, torch.cat((wanted, x[..., 4:]), -1))


def test_a_negative_slot_is_not_written(isa):
    caches = torch.zeros(2, 1, 2, 1, 4)
    q, k, v = torch.ones(3, 2, 1, 4)
    cos_sin = cos_sin_reference(torch.zeros(1, 2, 2), torch.zeros(2, dtype=torch.int64))
    rope_and_store_kv(q, CurrentKV(k, v + 1, cos_sin, None, torch.tensor([-1, 1])), tuple(caches))
    assert (caches[1].flatten() == torch.tensor([0.0] * 4 + [2.0] * 4)).all()


def test_what_is_left_to_torch(called):
    cos_sin = cos_sin_reference(torch.zeros(1, 2, 2), torch.zeros(2, dtype=torch.int64))
    q, k, v = torch.ones(3, 2, 1, 4).bfloat16()
    caches = torch.zeros(2, 1, 2, 1, 4)
    rope_and_store_kv(q, CurrentKV(k, v, cos_sin, None, torch.tensor([0, 1])), tuple(caches))  # a cache of another type
    assert called == [] and (caches[1] == 1).all()
