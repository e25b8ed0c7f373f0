"""Attention over the paged KV cache, with rotary embedding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....comm.base import Comm
from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.activation.activation import scale_by_sigmoid
from ....kernels.attention.attention import AttentionParams, paged_attention, store_and_attend
from ....kernels.attention.backend import AttentionMetadata
from ....kernels.attention.chunks import by_chunks
from ....kernels.norm.norm import rms_norm
from ....kernels.rope.rope import CosSin, CurrentKV, KVCache, QKNorm, apply_rotary, rope_and_store_kv
from ..batch import Batch
from ..config import FULL, SLIDING
from ..shard import Shard, even, whole
from ..weights.slicing import Field, Vector
from .linear import ColumnParallel
from .residual import Normed


def layer_type(types: Sequence[str], index: int, default: str, supported: Sequence[str] = (FULL, SLIDING)) -> str:
    """A layer's entry in config.json's layer_types; default: where config.json has none.

    Raises FatalError where the list is too short, or has a type that is not supported. It may be too long: models with
    layers removed have such lists.
    """
    if not types:
        return default
    if index >= len(types):
        raise FatalError(f"config.json: layer_types has {len(types)} entries, and none for layer {index}", MODEL)
    if types[index] not in supported:
        names = ", ".join(supported)
        raise FatalError(f"config.json: layer type {types[index]!r} is not supported; supported are {names}", MODEL)
    return types[index]


class PagedAttention:
    """Applies the rotary embedding, writes the step's keys and values to the layer's cache, and attends to the cache.

    layer: the layer's index in this pipeline stage, by which it finds its cache. source: the layer whose cache it
    reads, where that is another (`shared`). causal: tokens attend up to themselves, whatever the batch's `reach` has.
    chunk: they attend to those of their chunk of so many tokens; 0: to all.
    """

    def __init__(
        self, layer: int, params: AttentionParams, source: int | None = None, causal: bool = False, chunk: int = 0
    ):
        self.layer, self.params, self.causal, self.chunk = layer, params, causal, chunk
        self.source = layer if source is None else source

    def __call__(
        self,
        h: Normed,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: CosSin,
        batch: Batch,
        norms: QKNorm | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] are computed from h, and may be overwritten.

        Returns [T, heads * head_dim]. In the last layer only sampled rows continue: it returns [S, heads * head_dim]
        and reduces h's residual stream to the same rows. norms: the QK norm, before the rotary embedding.
        sinks: a logit of each head [heads] f32, as AttentionParams has it.
        """
        params = self.params if sinks is None else self.params._replace(sinks=sinks)
        batch = batch.of_layer(self.layer)
        cache, new = kv_tensors(batch.caches[self.layer]), CurrentKV(k, v, cos_sin, norms, batch.slots)
        if cos_sin.q_scale is not None:  # a factor and a rotation commute
            assert norms is None
            q.mul_(cos_sin.q_scale)
        if batch.replayed is None and not batch.ends(self.layer):
            seen = self._seen(batch)
            rows = _rows(seen, self.chunk, cache[0])
            if rows is seen or batch.query_len == 1:  # else a sequence's tokens, as rows, read each other's keys
                return store_and_attend(q, new, cache, rows, params)
        q = rope_and_store_kv(q, new, cache)
        attend = functools.partial(self._attend, self.layer, params)
        return batch.mix(h.keep, self.layer, q.shape[1], cache[1].shape[3], attend, q)

    def _seen(self, batch: Batch) -> Batch:
        return replace(batch, reach=None) if self.causal and batch.reach is not None else batch

    def _attend(
        self, layer: int, params: AttentionParams, batch: Batch, q: Tensor, out: Tensor | None = None
    ) -> Tensor:
        batch = self._seen(batch.of_layer(layer))
        keys, values, scales = KVCache(*kv_tensors(batch.caches[layer]))
        return paged_attention(q, keys, values, _rows(batch, self.chunk, keys), params, scales, out)

    def shared(self, h: Normed, q: Tensor, cos_sin: CosSin, batch: Batch) -> Tensor:
        """Attention of queries [T, heads, head_dim], normed and not rotated, to the cache of `source`, which has the
        step's keys and values already. Returns as __call__ does."""
        attend = functools.partial(self._attend, self.source, self.params)
        batch = batch.of_layer(self.source)
        return batch.mix(h.keep, self.layer, q.shape[1], q.shape[2], attend, apply_rotary(q, cos_sin))


def kv_tensors(cache: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The keys and values of a layer's cache, without the states of whole sequences that may follow, in f32."""
    return cache[: 3 if len(cache) > 2 and cache[2].dtype == torch.uint8 else 2]


def _rows(batch: Batch, chunk: int, keys: Tensor) -> AttentionMetadata:
    return by_chunks(batch, chunk, keys.shape[1]) if chunk else batch


class HeadGates(ColumnParallel):
    """A gate of each of this rank's heads, whose sigmoid scales what the head reads."""

    def __init__(self, hidden: int, heads: int, mesh: Mesh):
        super().__init__(whole(hidden), (even(heads, mesh.tensor.rank, mesh.tensor.size),), bias=False)

    def around(self, h: Normed, batch: Batch, attend: Callable[[], Tensor]) -> Tensor:
        """The scaled output of `attend`, [T, heads * dim], which reduces h to sampled rows in the last layer."""
        gates = self(h)
        out = attend()
        gates = batch.rows_like(out, gates)
        heads = out.view(-1, out.shape[1] // gates.shape[1])
        return scale_by_sigmoid(heads, gates.reshape(-1, 1)).view(out.shape)


class Sinks(Vector):
    """A logit of each of this rank's heads, which takes part in the softmax and has no value."""

    fields = (Field("weight", "o", torch.float32),)


class ShardedRMSNorm(Vector):
    """An RMS norm over all heads of a projection, of which this rank has some: QK norm as OLMo 2 has it."""

    def __init__(self, shard: Shard, eps: float):
        super().__init__(shard)
        self.eps = eps


def norm_projections(
    norms: tuple[ShardedRMSNorm, ShardedRMSNorm], q: Tensor, k: Tensor, group: Comm
) -> tuple[Tensor, Tensor]:
    """q [T, heads, head_dim] and k [T, kv_heads, head_dim] of this rank, each normed over the heads of all ranks.

    The group's ranks add up their sums of squares, of both in one all-reduce. Where ranks hold copies of a key head,
    all of them count alike, so that the mean is right.
    """
    if group.size == 1:
        q, k = (rms_norm(x.flatten(1), n.weight, n.eps).view(x.shape) for x, n in zip((q, k), norms, strict=True))
        return q, k
    wide = [x.flatten(1).float() for x in (q, k)]
    means = group.all_reduce(torch.stack([x.square().mean(1) for x in wide])) / group.size
    q, k = (
        (x * (mean[:, None] + n.eps).rsqrt() * n.weight).to(q.dtype).view(of.shape)
        for x, mean, n, of in zip(wide, means, norms, (q, k), strict=True)
    )
    return q, k
