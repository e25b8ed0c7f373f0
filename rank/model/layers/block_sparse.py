"""Attention to blocks of tokens that an indexer chooses for each key head (MiniMax-M3, arXiv 2606.13392).

Index queries and the index key come of the hidden state. A rank has the index queries of its own key heads, and the
index key, which they share, as every other rank of its tensor group.
"""

from __future__ import annotations

from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.attention.attention import AttentionParams
from ....kernels.attention.block_sparse import Blocks, block_sparse_attention
from ....kernels.attention.indexer import IndexNorm, rope_and_store_index
from ....kernels.rope.rope import CosSin, CurrentKV, KVCache, QKNorm, rope_and_store_kv
from ..batch import Batch
from ..shard import key_heads, scaled, whole
from .attention import PagedAttention, kv_tensors
from .linear import ColumnParallel
from .norm import RMSNorm
from .residual import Normed


class BlockIndexer(nn.Module):
    """Attributes are named as transformers' checkpoints name their tensors. `qk_proj` merges q_proj and k_proj."""

    def __init__(self, hidden: int, kv_heads: int, dim: int, mesh: Mesh, eps: float, norm_offset: float):
        super().__init__()
        heads = key_heads(kv_heads, mesh.tensor.rank, mesh.tensor.size)
        self.qk_proj = ColumnParallel(whole(hidden), (scaled(heads, dim), whole(dim)), bias=False)
        self.q_norm, self.k_norm = (RMSNorm(dim, eps, norm_offset) for _ in range(2))
        self.heads, self.dim = heads.width, dim

    def forward(self, h: Normed, cos_sin: CosSin, slots: Tensor, cache: tuple[Tensor, ...]) -> Tensor:
        """Index queries [T, heads, dim]; keys are stored. cache: of index keys, and scales of those in e4m3."""
        q, k = self.qk_proj(h).split([self.heads * self.dim, self.dim], 1)
        q = self.q_norm(q.reshape(len(q), self.heads, self.dim))
        keys, *scales = cache
        norm = IndexNorm(self.k_norm.weight, None, self.k_norm.eps)
        return rope_and_store_index(q, k, norm, cos_sin, keys, slots, *scales)


class BlockSparseAttention(PagedAttention):
    """PagedAttention to chosen blocks. The layer's cache has index keys behind keys and values."""

    def __init__(self, layer: int, params: AttentionParams, blocks: Blocks, rotated: int):
        """layer: as PagedAttention has it. rotated: elements of an index key that are."""
        super().__init__(layer, params)
        self.blocks, self.rotated = blocks, rotated

    def index_cache(self, batch: Batch) -> tuple[Tensor, ...]:
        caches = batch.caches[self.layer]
        return caches[len(kv_tensors(caches)) :]

    def attend_blocks(
        self, h: Normed, q: Tensor, k: Tensor, v: Tensor, cos_sin: CosSin, batch: Batch, norms: QKNorm, index_q: Tensor
    ) -> Tensor:
        """Attend as PagedAttention's __call__ does. index_q: the indexer's queries, whose keys are stored."""
        cache = kv_tensors(batch.caches[self.layer])
        q = rope_and_store_kv(q, CurrentKV(k, v, cos_sin, norms, batch.slots), cache)
        return batch.mix(h.keep, self.layer, q.shape[1], cache[1].shape[3], self._attend_chosen, q, index_q)

    def _attend_chosen(self, batch: Batch, q: Tensor, index_q: Tensor, out: Tensor | None = None) -> Tensor:
        cache = KVCache(*kv_tensors(batch.caches[self.layer]))
        keys, *scales = self.index_cache(batch)
        return block_sparse_attention(q, cache, index_q, keys, batch, self.params, self.blocks, self.rotated, *scales)
