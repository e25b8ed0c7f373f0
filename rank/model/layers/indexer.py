"""Latent attention to the tokens that an indexer chooses (DeepSeek-V3.2-Exp: DeepSeek-AI 2025, section 2.1).

Index queries come of the queries' latent and index keys of the hidden state. Every rank of a tensor group computes all
of the indexer, so that all choose the same tokens. A layer without an indexer attends to those that the last one with
an indexer chose.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.attention.attention import AttentionParams
from ....kernels.attention.backend import Selection
from ....kernels.attention.indexer import IndexNorm, rope_and_store_index, select
from ....kernels.attention.mla import LatentNorm, latent_attention, rope_and_store_latents, sparse_latent_attention
from ....kernels.rope.rope import CosSin
from ..batch import Batch
from ..cache_spec import CacheSpec, Indexed, PagedLatent
from ..shard import whole
from .linear import ColumnParallel
from .mla import LatentAttention, LatentSizes
from .norm import LayerNorm
from .residual import Normed, Partial

INDEX_EPS = 1e-6  # of the norm of index keys; config.json has none for it


class IndexSizes(NamedTuple):
    """Sizes of a model's indexer."""

    heads: int
    dim: int
    topk: int
    interleaved: bool  # how the first elements of queries and keys are rotated


class Indexer(nn.Module):
    """Attributes are named as DeepSeek's checkpoints name their tensors. `wk_weights_proj` merges wk and
    weights_proj."""

    def __init__(self, hidden: int, query_latent: int, sizes: IndexSizes):
        super().__init__()
        self.sizes = sizes
        self.wq_b = ColumnParallel(whole(query_latent), (whole(sizes.heads * sizes.dim),), bias=False)
        self.wk_weights_proj = ColumnParallel(whole(hidden), (whole(sizes.dim), whole(sizes.heads)), bias=False)
        self.k_norm = LayerNorm(sizes.dim, INDEX_EPS)

    def forward(
        self, h: Normed, q_latent: Tensor, cos_sin: CosSin, slots: Tensor, cache: Tensor, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Index queries [T, heads, dim] and the heads' weights [T, heads]; keys are stored."""
        k, weights = self.wk_weights_proj(h).split([self.sizes.dim, self.sizes.heads], 1)
        q = self.wq_b(q_latent).view(len(k), self.sizes.heads, self.sizes.dim)
        assert self.k_norm.bias is not None
        norm = IndexNorm(self.k_norm.weight, self.k_norm.bias, INDEX_EPS)
        turn = cos_sin._replace(interleaved=self.sizes.interleaved)
        return rope_and_store_index(q, k, norm, turn, cache, slots, scales), weights


class IndexedLatentAttention(LatentAttention):
    def __init__(
        self, hidden: int, sizes: LatentSizes, params: AttentionParams, mesh: Mesh, local: int, bias: bool,
        index: IndexSizes, owner: bool = True,
    ):  # fmt: skip
        """owner: whether the layer has an indexer, as the first one of a stage has. local: as of LatentAttention."""
        super().__init__(hidden, sizes, params, mesh, local, bias)
        self.index = index
        self.indexer: nn.Module | None = Indexer(hidden, sizes.query_latent, index) if owner else None

    def cache_spec(self) -> CacheSpec:  # type: ignore[override]
        latent = super().cache_spec()
        return latent if self.indexer is None else Indexed(latent, PagedLatent(self.index.dim), self.index.topk)

    @property
    def inner(self) -> int:
        sizes = self.index
        return super().inner + (0 if self.indexer is None else sizes.heads * (sizes.dim + 1) + sizes.dim)

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        """In the last layer only sampled rows continue: h's residual stream is reduced to them."""
        q_latent, latents = self.q_a_kv_a_proj(h)
        q_latent = self.q_a_layernorm(q_latent)
        q = self.q_b_proj(q_latent).view(len(latents), -1, self.sizes.nope + self.sizes.rope)
        caches, indexer = batch.caches[self.local], self.indexer
        half = len(caches) if indexer is None else len(caches) // 2
        cache, *scales = caches[:half]
        norm = LatentNorm(self.kv_a_layernorm.weight, self.sizes.eps)
        rope_and_store_latents(q, latents, norm, cos_sin, cache, batch.slots, *scales)
        given = (q,) if indexer is None else (q, *self._index(h, q_latent, cos_sin, batch))
        of_heads = q.shape[1], self.sizes.value
        if batch.replayed is not None:
            return self.o_proj(batch.run(*of_heads, self._store_and_attend, *given))
        if batch.sampled is not None and batch.ends(self.local) and indexer is None and batch.selection is not None:
            batch.sampled.selection = batch.selection.keep(batch.sample_at, batch.sampled.kv_lens)
        given = self._store(batch, *given)
        return self.o_proj(batch.mix(h.keep, self.local, *of_heads, self._attend, *given))

    def _store_and_attend(self, batch: Batch, *given: Tensor, out: Tensor) -> Tensor:
        return self._attend(batch, *self._store(batch, *given))

    def _index(self, h: Normed, q_latent: Tensor, cos_sin: CosSin, batch: Batch) -> tuple[Tensor, ...]:
        """Queries and weights of the indexer, and what `_store` stores."""
        caches = batch.caches[self.local]
        assert self.indexer is not None
        return self.indexer(h, q_latent, cos_sin, batch.slots, *caches[len(caches) // 2 :])

    def _store(self, batch: Batch, *given: Tensor) -> tuple[Tensor, ...]:
        """Stores what depends on the step's sequences, and returns the rest, which `_attend` reads."""
        return given

    def _select(
        self, batch: Batch, q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None = None
    ) -> Selection | None:
        return select(q, weights, keys, batch, self.index.topk, self.sizes.rope, scales)

    def _attend(self, batch: Batch, q: Tensor, *index: Tensor) -> Tensor:
        """[T, heads * value]. index: queries and weights of the indexer, if the layer has one."""
        caches = batch.caches[self.local]
        up, half = self.kv_b_proj.plain, len(caches) // 2 if index else len(caches)
        cache, *scales = caches[:half]
        if index:
            batch.selection = self._select(batch, *index, *caches[half:])
        if batch.selection is None:
            return latent_attention(q, cache, up, batch, self.params, *scales)
        return sparse_latent_attention(q, cache, up, batch.selection, self.params, *scales)
