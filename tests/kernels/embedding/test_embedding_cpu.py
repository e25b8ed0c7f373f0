import pytest
import torch
from phalanx.kernels.embedding.embedding import embedding, embedding_reference
from phalanx.kernels.rope.rope import cos_sin, cos_sin_reference

from ..conftest import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 64])
def test_embedding(isa, threads, called, dtype, width):
    weight = torch.randn(10, width).to(dtype)
    ids = torch.tensor([3, 12, 0, 9, 4, 2, 13])
    assert torch.equal(embedding(ids, weight, 3, whole=False), embedding_reference(ids, weight, 3, whole=False))
    assert torch.equal(embedding(ids[:1], weight), weight[3:4]) and embedding(ids[:0], weight).shape == (0, width)
    assert (embedding(torch.tensor([-1, 5]), weight)[0] == 0).all()  # rows that fill a captured batch up
    assert len(called) == 4
    got, want = (f(ids, weight, 3, whole=False, scale=6.93) for f in (embedding, embedding_reference))
    assert torch.equal(got, want) and torch.equal(got[0], (weight[0].float() * 6.93).to(dtype))


def test_cosines_and_sines(isa, threads, called):
    table, positions = torch.randn(20, 2, 7), torch.tensor([3, 19, 0, 3, 5])
    got, want = cos_sin(table, positions), cos_sin_reference(table, positions)
    assert torch.equal(got.cos, want.cos) and torch.equal(got.sin, want.sin)
    assert called == ["cos_sin_f32"]
