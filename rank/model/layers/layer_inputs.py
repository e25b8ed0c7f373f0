"""Embeddings of each token for each layer (Gemma 3n 2025, Gemma 4 2026): rows of a table that may lie in host memory,
joined with a projection of the token's embedding, and gated by the residual stream in each layer."""

from __future__ import annotations

from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.activation.activation import activate
from ..batch import Batch
from ..shard import whole
from .embedding import VocabParallelEmbedding
from .linear import ColumnParallel
from .mlp import activation
from .norm import PostNorm, RMSNorm
from .residual import PostNormed, ResidualStream


class LayerInputs(nn.Module):
    """Embeds tokens for all layers."""

    def __init__(self, hidden: int, vocab: int, layers: int, size: int, eps: float, mesh: Mesh):
        super().__init__()
        self.shape, self.scale = (layers, size), hidden**-0.5
        self.embed_tokens_per_layer = VocabParallelEmbedding(vocab, layers * size, mesh, size**0.5)
        self.per_layer_model_projection = ColumnParallel(whole(hidden), (whole(layers * size),), False)
        self.per_layer_projection_norm = RMSNorm(size, eps)

    def forward(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """embedded [T, H], and ids [T] int64 → [T, layers, size], equal on all ranks."""
        made = self.per_layer_model_projection(embedded).mul_(self.scale).view(-1, *self.shape)
        own = self.embed_tokens_per_layer(ids).view(-1, *self.shape)
        return (self.per_layer_projection_norm(made) + own) * 2**-0.5


class LayerInput(nn.Module):
    """Gates a token's embedding for this layer by the residual stream, and brings it to its size."""

    def __init__(self, hidden: int, size: int, act: str, eps: float, index: int):
        super().__init__()
        self.index, self.act = index, activation(act)
        self.per_layer_input_gate = ColumnParallel(whole(hidden), (whole(size),), bias=False)
        self.per_layer_projection = ColumnParallel(whole(size), (whole(hidden),), bias=False)
        self.post_per_layer_input_norm = PostNorm(hidden, eps)

    def forward(self, stream: ResidualStream, batch: Batch) -> PostNormed:
        assert batch.layer_inputs is not None
        own = batch.rows_like(stream, batch.layer_inputs[:, self.index])
        gated = activate(self.per_layer_input_gate(stream.read()), self.act) * own
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))
