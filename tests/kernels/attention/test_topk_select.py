"""The choice of a token's best scores: the kernel, run on a CPU thread by thread, against the reference."""

import pytest
import torch
from phalanx.kernels.attention.topk_select import THREADS, kept_scores, sizes

from .. import cuda_model
from .indexing import check_topk, topk_reference


@pytest.fixture(params=[1, 4])
def select(cuda_models, request):
    """The choice by clusters of so many blocks."""
    library = cuda_models.build("topk_select", dict(T=torch.float32, **sizes(request.param)))

    def run(scores, tables, seen, slots, counts, query_len, block_size, kept=None):
        kept = kept_scores(scores.shape[1], request.param) if kept is None else kept
        arguments = query_len, slots.shape[1], scores.stride(0), tables.stride(0), block_size, kept
        grid, cluster = (len(slots) * request.param, 1, 1), request.param
        cuda_model.launch(
            library, grid, THREADS, (scores, tables, seen, slots, counts, *arguments), scores, cluster=cluster
        )

    return run


def test_best_scores(select):
    check_topk(select, "cpu")


def test_tokens_of_several_sequences(select):
    """Some see fewer scores than are chosen, and what none sees is not read; blocks keep a few scores."""
    torch.manual_seed(0)
    scores, seen = torch.randn(6, 90), torch.tensor([3, 20, 21, 60, 89, 90], dtype=torch.int32)
    scores[torch.arange(90) >= seen[:, None]] = float("nan")
    tables = torch.randperm(60, dtype=torch.int32).view(2, 30)
    found, want = ((torch.full((6, 20), -1, dtype=torch.int32), torch.empty(6, dtype=torch.int32)) for _ in range(2))
    topk_reference(scores, tables, seen, *want, 3, 4)
    select(scores, tables, seen, *found, 3, 4, kept=7)
    assert all(map(torch.equal, found, want)) and want[1].tolist() == [3, 20, 20, 20, 20, 20]
