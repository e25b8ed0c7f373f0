from __future__ import annotations

from torch import Tensor

from ....kernels.attention import Scores
from ....kernels.halves import attention
from ....kernels.rope import HeadNorms, Rotation
from ..batch import Batch
from .linear import QKV, Row
from .norm import RMSNorm, StreamNorm


class PagedAttention:
    """Turns queries and keys, writes the step's keys and values to a layer's cache and attends to all that it holds.

    `layer` counts this stage's layers: it chooses the cache.
    """

    def __init__(self, head_dim: int, layer: int, window: int = 0):
        self.layer = layer
        self.scores = Scores(scale=head_dim**-0.5, window=window)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: StreamNorm,
        qkv: QKV,
        out: Row,
        turn: Rotation,
        batch: Batch,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Of what `norm` makes of x and residual [T, hidden], qkv makes queries, keys and values.

        Returns `out`'s part of a sum, [T, hidden], and the new residual; in the last layer both of the rows that go on.
        norms: what each head of q and of k passes before it is turned.
        """
        heads = HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps) if norms else None
        cache = batch.caches[self.layer]
        sampled = batch.sampled if self.layer == len(batch.caches) - 1 else None
        products = qkv.product, qkv.heads, out.product
        return attention(x, residual, norm, *products, turn, heads, cache, batch, self.scores, sampled)
