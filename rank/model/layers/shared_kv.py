"""Attention whose keys and values may be another layer's, or whose keys may be its values (Gemma 4 2026)."""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import nn
from torch.nn.functional import rms_norm

from ....comm.mesh import Mesh
from ....errors import USAGE, FatalError
from ....kernels.attention.attention import AttentionParams
from ....kernels.rope.rope import CosSin, QKNorm
from ..batch import Batch
from ..cache_spec import CacheSpec, PagedKV, SharedCache
from .attention import PagedAttention
from .linear import QKVParallel, RowParallel
from .norm import RMSNorm
from .residual import Normed, Partial


class SharedKVSizes(NamedTuple):
    """Sizes of a layer's attention."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int  # of a head
    eps: float
    bias: bool
    key_outputs: int  # 2: keys and values; 1: keys, which are the values, too; 0: another layer's
    causal: bool  # also within an image


NAMES = "q_proj", "qk_proj", "qkv_proj"  # of the linear, by key_outputs


class SharedKVAttention(nn.Module):
    """Queries and keys are normed, and so are values, without a weight."""

    def __init__(self, sizes: SharedKVSizes, params: AttentionParams, mesh: Mesh, index: int, local: int, source: int):
        """index: of the layer in the model. local, source: of this layer and of the one whose keys and values it reads
        in this pipeline stage. Raises FatalError where ranks cannot share the key heads out."""
        super().__init__()
        hidden, heads, kv_heads, dim, eps, bias, self.key_outputs, causal = sizes
        self.dim, self.eps, ranks = dim, eps, mesh.tensor.size
        if kv_heads % ranks and ranks % kv_heads:
            raise FatalError(f"--tp {ranks}: layer {index} has {kv_heads} key heads, which cannot be shared out", USAGE)
        linear = QKVParallel(hidden, heads, kv_heads, dim, mesh, bias, key_outputs=self.key_outputs)
        self.add_module(NAMES[self.key_outputs], linear)
        self.q_norm = RMSNorm(dim, eps)
        if self.key_outputs:
            self.k_norm = RMSNorm(dim, eps)
        self.o_proj = RowParallel(heads * dim, hidden, mesh, bias)
        self.attention = PagedAttention(local, params, source, causal)

    def cache_spec(self) -> CacheSpec:
        if not self.key_outputs:
            return SharedCache()
        heads = self.projection.heads
        return PagedKV(heads.keys, heads.dim, heads.dim, self.attention.params.window)

    @property
    def projection(self) -> QKVParallel:
        """The linear of queries, and of keys and values as far as these are its own."""
        return cast(QKVParallel, getattr(self, NAMES[self.key_outputs]))

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        linear = self.projection
        q, *own = linear.split(linear(h))
        if not own:
            return self.o_proj(self.attention.shared(h, self.q_norm(q), cos_sin, batch))
        k, v = own[0], rms_norm(own[-1], (self.dim,), eps=self.eps)
        norms = QKNorm(self.q_norm.weight, self.k_norm.weight, self.eps)
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch, norms))
