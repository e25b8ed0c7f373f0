"""Attention over the paged KV cache, with rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....errors import MODEL, FatalError
from ....kernels.attention.attention import AttentionParams, paged_attention, store_and_attend
from ....kernels.rope.rope import CosSin, QKNorm, rope_and_store_kv
from ..batch import Batch
from ..config import FULL, SLIDING
from .residual import Normed


def layer_type(types: Sequence[str], index: int, default: str) -> str:
    """SLIDING or FULL: a layer's entry in config.json's layer_types; default: where config.json has none.

    Raises FatalError where the list is too short, or has a type that no attention has. It may be too long: models with
    layers removed have such lists.
    """
    if not types:
        return default
    if index >= len(types):
        raise FatalError(f"config.json: layer_types has {len(types)} entries, and none for layer {index}", MODEL)
    if types[index] not in (FULL, SLIDING):
        raise FatalError(
            f"config.json: layer type {types[index]!r} is not supported; supported are {FULL}, {SLIDING}", MODEL
        )
    return types[index]


class PagedAttention:
    """Applies the rotary embedding, writes the step's keys and values to the layer's cache, and attends to the cache.

    layer: the layer's index in this pipeline stage, by which it finds its cache.
    """

    def __init__(self, layer: int, params: AttentionParams):
        self.layer, self.params = layer, params

    def __call__(
        self, h: Normed, q: Tensor, k: Tensor, v: Tensor, cos_sin: CosSin, batch: Batch, norms: QKNorm | None = None
    ) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] are computed from h, and may be overwritten.

        Returns [T, heads * head_dim]. In the last layer only sampled rows continue: it returns [S, heads * head_dim]
        and reduces h's residual stream to the same rows. norms: the QK norm, before the rotary embedding.
        """
        cache = batch.caches[self.layer]
        if cos_sin.q_scale is not None:  # a factor and a rotation commute
            assert norms is None
            q.mul_(cos_sin.q_scale)
        if batch.sampled is None or self.layer < len(batch.caches) - 1:
            return store_and_attend(q, k, v, cos_sin, norms, cache, batch, self.params)
        q = rope_and_store_kv(q, k, v, cos_sin, norms, cache, batch.slots)
        h.keep(batch.sample_at)
        if len(batch.sample_at) == 0:
            return q[:0].flatten(1)
        return paged_attention(q[batch.sample_at], *cache, batch.sampled, self.params)
