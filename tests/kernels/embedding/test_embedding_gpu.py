"""Rows of the embedding and of the rotary tables on a GPU against their torch references."""

import pytest
import torch
from phalanx.kernels.embedding import embedding
from phalanx.kernels.rope import rope

from ...devices import require_gpu
from ..gpu import poison  # noqa: F401

require_gpu()


@pytest.mark.parametrize("width", [4096, 36, 7])
def test_embedding_and_cos_sin(width):
    table = torch.randn(50, width, device="cuda").half()
    ids = torch.randint(90, (13,), device="cuda")
    want = embedding.embedding_reference(ids, table, 20, whole=False)
    assert torch.equal(embedding.embedding(ids, table, 20, whole=False), want)
    scaled = embedding.embedding_reference(ids, table, 20, whole=False, scale=6.93)
    assert torch.equal(embedding.embedding(ids, table, 20, whole=False, scale=6.93), scaled)
    assert embedding.embedding(ids[:0], table).shape == (0, width)
    table[0] = float("nan")  # a row of no token reads none
    none = torch.tensor([-1, 3], device="cuda")
    assert torch.equal(embedding.embedding(none, table), torch.stack([torch.zeros_like(table[3]), table[3]]))
    angles = torch.randn(90, 2, width, device="cuda")
    for got, wanted in zip(rope.cos_sin(angles, ids)[:2], rope.cos_sin_reference(angles, ids)[:2], strict=True):
        assert torch.equal(got, wanted)
