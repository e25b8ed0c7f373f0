"""Latent attention to the pools of tokens that an indexer chooses (GLM-5.3: Zhipu AI 2026).

Neighbouring tokens share an index key: each of its elements is a mean of theirs, weighted by a softmax over the pool.
A token reads the best pools among those that have ended, and all tokens of its own pool if that has not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.attention import compressed
from ....kernels.attention.attention import AttentionParams
from ....kernels.attention.backend import Selection
from ....kernels.attention.compressed import Compression
from ....kernels.attention.indexer import select, tokens_of_pools
from ....kernels.rope.rope import CosSin
from ..batch import Batch
from ..cache_spec import CacheSpec, Indexed, PagedLatent
from ..shard import whole
from .compressed_attention import PositionBias
from .indexer import INDEX_EPS, IndexedLatentAttention, IndexSizes
from .linear import ColumnParallel
from .mla import LatentSizes
from .norm import LayerNorm
from .residual import Normed


class PooledIndexer(nn.Module):
    """Attributes are named as DeepSeek's checkpoints name their tensors. `wk_wgate_weights_proj` merges wk, wgate and
    weights_proj."""

    def __init__(self, hidden: int, query_latent: int, sizes: IndexSizes, pool: int):
        super().__init__()
        self.sizes, self.pool = sizes, pool
        self.wq_b = ColumnParallel(whole(query_latent), (whole(sizes.heads * sizes.dim),), bias=False)
        outputs = whole(sizes.dim), whole(sizes.dim), whole(sizes.heads)
        self.wk_wgate_weights_proj = ColumnParallel(whole(hidden), outputs, bias=False)
        self.k_norm = LayerNorm(sizes.dim, INDEX_EPS)
        self.bias = PositionBias(pool, sizes.dim)

    def forward(self, h: Normed, q_latent: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Index queries [T, heads, dim], the heads' weights [T, heads], and what tokens bring to their pools' keys,
        values and gates [T, 2 * dim] f32."""
        dim = self.sizes.dim
        k, gates, weights = self.wk_wgate_weights_proj(h).split([dim, dim, self.sizes.heads], 1)
        gates = gates.float() + self.bias.ape[positions % self.pool]
        q = self.wq_b(q_latent).view(len(k), self.sizes.heads, dim)
        return q, weights, torch.cat((self.k_norm(k.contiguous()).float(), gates), 1)


class PooledLatentAttention(IndexedLatentAttention):
    """Latent attention whose queries and keys are not rotated, with an indexer in each layer."""

    def __init__(
        self, hidden: int, sizes: LatentSizes, params: AttentionParams, mesh: Mesh, local: int, bias: bool,
        index: IndexSizes, pool: int,
    ):  # fmt: skip
        """pool: tokens that share an index key. The rest is as IndexedLatentAttention has it."""
        super().__init__(hidden, sizes, params, mesh, local, bias, index, owner=False)
        self.pool = Compression(pool, index.dim)
        self.indexer = PooledIndexer(hidden, self.sizes.query_latent, index, pool)

    def cache_spec(self) -> CacheSpec:  # type: ignore[override]
        rate, latent = self.pool.rate, PagedLatent(self.sizes.latent + self.sizes.rope)
        return Indexed(latent, PagedLatent(self.index.dim), self.index.topk + rate - 1, rate)

    @property
    def inner(self) -> int:
        """Values and gates are f32, and gathered as often as keys are made."""
        return super().inner + 2 * 4 * 2 * self.index.dim

    def _index(self, h: Normed, q_latent: Tensor, cos_sin: CosSin, batch: Batch) -> tuple[Tensor, ...]:
        assert self.indexer is not None
        return self.indexer(h, q_latent, batch.positions)

    def _store(self, batch: Batch, *given: Tensor) -> tuple[Tensor, ...]:
        inputs = given[-1]
        _, keys, ring = batch.caches[self.local]
        windows = compressed.gather_windows(inputs, ring, batch.rows, batch, self.pool)
        compressed.write_ring(inputs, ring, batch.rows, batch)
        slots = batch.slots[windows.tokens].div(self.pool.rate, rounding_mode="floor")  # blocks have whole pools
        compressed.store(compressed.compress(windows.inputs, windows.known, self.pool), keys, slots)
        return given[:-1]

    def _select(
        self, batch: Batch, q: Tensor, weights: Tensor, keys: Tensor, ring: Tensor | None = None
    ) -> Selection | None:
        rate = self.pool.rate
        pools = select(q, weights, keys, batch, self.index.topk // rate, self.index.dim, stride=rate)
        return None if pools is None else tokens_of_pools(pools, batch, rate, keys.shape[1] * rate)
