"""The embedding table and the head, split by vocabulary; a vocabulary that does not divide is padded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.embedding import embedding
from ....kernels.linear import linear
from ..weights.slicing import Field, Sliced, pack_weight
from .shard import even, whole


class Embedding(Sliced):
    fields = (Field("weight", "oi"),)

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh):
        super().__init__()
        self.tensor = mesh.tensor
        self.vocab = even(vocab_size, self.tensor.rank, self.tensor.size)
        self.inputs, self.outputs = whole(hidden_size), (self.vocab,)
        self.weight = nn.Parameter(torch.empty(self.vocab.width, hidden_size, device="meta"), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [T] int64. Returns [T, hidden], equal on all ranks."""
        if self.tensor.size == 1:
            return embedding(ids, self.weight)
        return self.tensor.all_reduce(embedding(ids, self.weight, self.vocab.start, whole=False))


class Head(Embedding):
    """The same matrix from the other side. Tied models use one for both, unless this side's is packed."""

    def finish(self) -> None:
        pack_weight(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, hidden]. Returns logits of this rank's vocabulary, [S, width] of x's dtype; padding is -inf."""
        logits = linear(x, self.weight)
        present = self.vocab.stop - self.vocab.start
        if present < self.vocab.width:
            logits[:, present:] = float("-inf")
        return logits
