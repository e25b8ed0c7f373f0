"""Rows of the embedding and of the rotary tables on a GPU against their torch references."""

import pytest
import torch
from phalanx.kernels import host_memory
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


@pytest.mark.parametrize("tokens, width", [(1, 10752), (300, 10752), (13, 7)])
def test_rows_of_pinned_host_memory(tokens, width):
    """Read where they lie, by replays of a CUDA graph, too."""
    table = host_memory.pinned(torch.randn(50, width).bfloat16())
    assert table.is_pinned() and host_memory.in_reach(torch.device("cuda"))
    ids = torch.randint(90, (tokens,), device="cuda")
    want = embedding.embedding_reference(ids, table.cuda(), 20, whole=False, scale=16.0)
    assert torch.equal(embedding.embedding(ids, table, 20, whole=False, scale=16.0), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = embedding.embedding(ids, table, 20, whole=False, scale=16.0)
    for _ in range(2):
        ids.copy_(ids.flip(0))
        want = want.flip(0)
        graph.replay()
        assert torch.equal(found, want)
