"""The token embedding and the head, split by vocabulary over the tensor group, and learned positions.

Uneven vocabularies are padded.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.embedding.embedding import embedding
from ....kernels.sampling.logits import finish_logits
from ..formats import Part
from ..formats._half_floats import Part as HalfFloats
from ..shard import even, whole
from ..weights.slicing import Field, ShardedModule
from .linear import ColumnParallel
from .residual import Normed


class VocabParallelEmbedding(ShardedModule):
    """Looks up token embeddings. With tensor parallelism it costs an all-reduce."""

    fields = (Field("weight", "oi"),)

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh, scale: float = 1.0):
        """scale: a factor on the embeddings, rounded to their dtype."""
        super().__init__()
        self.scale = scale
        self.tensor = mesh.tensor
        self.vocab = even(vocab_size, self.tensor.rank, self.tensor.size)
        self.inputs, self.outputs = whole(hidden_size), (self.vocab,)
        self.weight = nn.Parameter(torch.empty(self.vocab.width, hidden_size, device="meta"), requires_grad=False)
        self.kept: torch.dtype | None = None

    def keep(self, dtype: torch.dtype) -> None:
        """Leave the table in the checkpoint's dtype, this one, whatever the model computes in."""
        self.kept, self.fields = dtype, (Field("weight", "oi", stored=True),)

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return self.kept or super().dtype_of(name, dtype)

    def finish(self) -> None:
        self.scale = torch.tensor(self.scale, dtype=self.model_dtype).item()

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [T] int64. Returns [T, hidden], equal on all ranks."""
        if self.tensor.size == 1:
            return embedding(ids, self.weight, scale=self.scale, dtype=self.model_dtype)
        # Scaled before the sum: of each row's parts all but one are zeros.
        part = embedding(ids, self.weight, self.vocab.start, False, self.scale, self.model_dtype)
        return self.tensor.all_reduce(part)


class PositionEmbedding(ShardedModule):
    """Learned positions: a row for each, which is added to the token's. Every rank has them all."""

    fields = (Field("weight", "oi"),)

    def __init__(self, positions: int, hidden_size: int):
        super().__init__()
        self.inputs, self.outputs = whole(hidden_size), (whole(positions),)
        self.weight = nn.Parameter(torch.empty(positions, hidden_size, device="meta"), requires_grad=False)

    def forward(self, positions: Tensor) -> Tensor:
        """positions: [T] int64, below the table's. Returns [T, hidden]."""
        return embedding(positions, self.weight)


class ParallelLMHead(ColumnParallel):
    """Computes the logits of this rank's shard of the vocabulary. In tied models it shares the embedding's weight."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        mesh: Mesh,
        scale: float = 1.0,
        softcap: float = 0.0,
        bias: bool = False,
    ):
        """scale: a factor on the logits. softcap: then x becomes softcap * tanh(x / softcap); 0: no cap."""
        self.scale, self.softcap = scale, softcap
        self.vocab = even(vocab_size, mesh.tensor.rank, mesh.tensor.size)
        super().__init__(whole(hidden_size), (self.vocab,), bias)

    def tie(self, table: VocabParallelEmbedding) -> None:
        """Share the embedding's parameter, which is loaded there. A head that a file holds quantised reads that."""
        part = cast(Part, self.parts[0])
        if any(field.name == "weight" for field in part.fields):
            part.weight, part.sources = table.weight, ()
        if isinstance(part, HalfFloats):
            table.keep(part.dtype)

    def forward(self, h: Normed | Tensor) -> Tensor:
        """h: [S, hidden]. Returns logits of this rank's vocabulary, [S, width] of its dtype; padding is -inf."""
        present = self.vocab.stop - self.vocab.start
        return finish_logits(super().forward(h), present, self.scale, self.softcap)
