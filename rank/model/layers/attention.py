from __future__ import annotations

from torch import Tensor, nn

from ....kernels.attention import Scores, write_and_attend
from ....kernels.rope import HeadNorms, Rotation
from ..batch import Batch
from .norm import RMSNorm


class PagedAttention(nn.Module):
    """Turns queries and keys, writes the step's keys and values to a layer's cache and attends to all that it holds.

    `layer` counts this stage's layers: it chooses the cache.
    """

    def __init__(self, head_dim: int, layer: int, window: int = 0):
        super().__init__()
        self.layer = layer
        self.scores = Scores(scale=head_dim**-0.5, window=window)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        turn: Rotation,
        batch: Batch,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> Tensor:
        """q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim]. Returns [T, heads * head_dim].

        norms: what each head of q and of k passes before it is turned. q, k and v may be overwritten.
        """
        heads = HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps) if norms else None
        return write_and_attend(q, k, v, turn, heads, batch.caches[self.layer], batch, self.scores)
