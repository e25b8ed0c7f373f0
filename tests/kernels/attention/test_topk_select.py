"""The choice of a token's best scores: the kernel, run on a CPU thread by thread, against the reference."""

import torch
from phalanx.kernels.attention.topk_select import THREADS

from .. import cuda_model
from .indexing import check_topk, topk_reference


def runner(cuda_models):
    library = cuda_models.build("topk_select", dict(T=torch.float32, THREADS=THREADS))

    def run(scores, tables, seen, slots, counts, query_len, block_size):
        sizes = query_len, slots.shape[1], scores.stride(0), tables.stride(0), block_size
        cuda_model.launch(library, (len(slots), 1, 1), THREADS, (scores, tables, seen, slots, counts, *sizes), scores)

    return run


def test_best_scores(cuda_models):
    check_topk(runner(cuda_models), "cpu")


def test_tokens_of_several_sequences(cuda_models):
    """Some see fewer scores than are chosen, and what none sees is not read."""
    torch.manual_seed(0)
    scores, seen = torch.randn(6, 90), torch.tensor([3, 20, 21, 60, 89, 90], dtype=torch.int32)
    scores[torch.arange(90) >= seen[:, None]] = float("nan")
    tables = torch.randperm(60, dtype=torch.int32).view(2, 30)
    found, want = ((torch.full((6, 20), -1, dtype=torch.int32), torch.empty(6, dtype=torch.int32)) for _ in range(2))
    topk_reference(scores, tables, seen, *want, 3, 4)
    runner(cuda_models)(scores, tables, seen, *found, 3, 4)
    assert all(map(torch.equal, found, want)) and want[1].tolist() == [3, 20, 20, 20, 20, 20]
