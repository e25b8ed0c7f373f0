from __future__ import annotations

from torch import Tensor

from ....kernels.attention.attention import AttentionParams, paged_attention, store_and_attend
from ....kernels.rope.rope import CosSin, QKNorm, rope_and_store_kv
from ..batch import Batch
from .residual import Normed


class PagedAttention:
    """Rotates queries and keys, writes the step's keys and values to a layer's cache and attends to all that it holds.

    `layer` counts this stage's layers: it chooses the cache.
    """

    def __init__(self, layer: int, params: AttentionParams):
        self.layer, self.params = layer, params

    def __call__(
        self, h: Normed, q: Tensor, k: Tensor, v: Tensor, cos_sin: CosSin, batch: Batch, norms: QKNorm | None = None
    ) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], which may be overwritten, are made of h.

        Returns [T, heads * head_dim]; in the last layer only sampled rows go on: [S, heads * head_dim], and h's
        stream with them. norms: what each head of q and of k passes before it is rotated.
        """
        cache = batch.caches[self.layer]
        if batch.sampled is None or self.layer < len(batch.caches) - 1:
            return store_and_attend(q, k, v, cos_sin, norms, cache, batch, self.params)
        q = rope_and_store_kv(q, k, v, cos_sin, norms, cache, batch.slots)
        h.keep(batch.sample_at)
        if len(batch.sample_at) == 0:
            return q[:0].flatten(1)
        return paged_attention(q[batch.sample_at], *cache, batch.sampled, self.params)
