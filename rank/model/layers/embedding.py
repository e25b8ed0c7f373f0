"""The token embedding and the head, split by vocabulary over the tensor group, and learned positions.

Uneven vocabularies are padded.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ....comm.mesh import Mesh
from ....kernels.embedding.embedding import embedding
from ....kernels.sampling.logits import finish_logits
from ..formats import ChooseFormat
from ..formats._part import Part
from ..shard import even, whole
from ..weights.slicing import Field, ShardedModule, Source, parameter
from .linear import ColumnParallel
from .residual import Normed


class VocabParallelEmbedding(ShardedModule):
    """Looks up token embeddings. With tensor parallelism it costs an all-reduce."""

    fields: tuple[Field, ...] = (Field("weight", "oi"),)

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh, scale: float = 1.0):
        """scale: a factor on the embeddings, rounded to their dtype."""
        super().__init__()
        self.scale = scale
        self.tensor = mesh.tensor
        self.vocab = even(vocab_size, self.tensor.rank, self.tensor.size)
        self.inputs, self.outputs = whole(hidden_size), (self.vocab,)
        self.weight = parameter(self.vocab.width, hidden_size)
        self.part: Part | None = None  # has the table, where that stays as the checkpoint has it
        self.tied = False  # a head reads all of the table

    def build(self, path: str, format_of: ChooseFormat) -> None:
        """Decide from the format of this path how the table is kept: plain, unless the format looks rows up."""
        self.sources = (Source(path),)
        part = format_of(path).part(self.inputs, self.outputs, False, self.sources)
        if part.looks_up:
            self.part, self.fields = part, ()
            del self.weight

    def finish(self) -> None:
        self.scale = torch.tensor(self.scale, dtype=self.model_dtype).item()

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [T] int64. Returns [T, hidden], equal on all ranks."""
        if self.part is not None:
            rows = self.part.rows(ids, self.vocab.start, self.scale, self.model_dtype)
            return rows if self.tensor.size == 1 else self.tensor.all_reduce(rows)
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
        self.weight = parameter(positions, hidden_size)

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
        """Share the embedding's weight, which is loaded there, as far as both have one form. Where a file's table is
        plain in memory, a head that it holds quantised reads that."""
        part, held = cast(Part, self.parts[0]), table.part or table
        if table.part is not None and not self.biased:
            self.parts[0], table.tied = table.part, True
        elif all(any(field.name == "weight" for field in one.fields) for one in (part, held)):
            part.weight, part.sources, table.tied = held.weight, (), True

    def forward(self, h: Normed | Tensor) -> Tensor:
        """h: [S, hidden]. Returns logits of this rank's vocabulary, [S, width] of its dtype; padding is -inf."""
        present = self.vocab.stop - self.vocab.start
        return finish_logits(super().forward(h), present, self.scale, self.softcap)
