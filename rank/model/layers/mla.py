"""Multi-head latent attention (DeepSeek-V2: arXiv 2405.04434, section 2.1).

All heads' keys and values come of one latent a token, which alone is cached. Over a tensor group heads are split; the
latent is computed and cached on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.attention.attention import AttentionParams
from ....kernels.attention.mla import LatentNorm, latent_attention, rope_and_store_latents, store_and_attend
from ....kernels.rope.rope import CosSin
from ..batch import Batch
from ..cache_spec import PagedLatent
from ..formats import ChooseFormat
from ..formats._packed import PackedPart
from ..formats._part import Part
from ..shard import Shard, even, scaled, whole
from ..weights.slicing import Field, ShardedModule, Source, parameter, stored_shape
from .linear import ColumnParallel, RowParallel
from .norm import RMSNorm
from .residual import Normed, Partial


class LatentSizes(NamedTuple):
    """Sizes of a model's latent attention."""

    heads: int  # of the model
    latent: int
    nope: int  # of a head's query and key without a position
    rope: int  # of the rest of a query, and of the key with a position that all heads share
    value: int
    query_latent: int  # from which queries come; 0: they come from the hidden state
    eps: float = 1e-6  # of the norms of latents; most models' config.json has none for them


class LatentProjection(ColumnParallel):
    """The inputs of queries, of this rank's heads or their latent, and the latent of keys and values, as one linear."""

    def __init__(self, hidden: int, sizes: LatentSizes, mesh: Mesh, bias: bool):
        heads = even(sizes.heads, mesh.tensor.rank, mesh.tensor.size)
        queries = whole(sizes.query_latent) if sizes.query_latent else scaled(heads, sizes.nope + sizes.rope)
        super().__init__(whole(hidden), (queries, whole(sizes.latent + sizes.rope)), bias)

    def forward(self, h: Normed | Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Parts of one tensor: [T, queries], [T, latent + rope]."""
        q, latents = super().forward(h).split([output.width for output in self.outputs], 1)
        return q, latents


class HeadMatrices(ShardedModule):
    """A matrix of each of this rank's heads, plain: of keys or of values alone, as GGUF files have them."""

    def __init__(self, heads: Shard, inputs: Shard, outputs: int, axes: str, source: Source):
        super().__init__()
        self.experts, self.inputs, self.outputs, self.sources = heads, inputs, (whole(outputs),), (source,)
        self.fields = (Field("weight", axes),)
        shape = stored_shape(self, self.fields[0])
        self.weight = parameter(shape)


class PlainColumnParallel(ColumnParallel):
    """A linear whose weight becomes plain once it is loaded, in whatever format the checkpoint has it: others than
    `forward` multiply with parts of it."""

    def build(self, sources: Sequence[Source], format_of: ChooseFormat) -> None:
        super().build(sources, lambda path: format_of(path).plain)
        for part in self.parts:
            if isinstance(part, PackedPart):
                part.expanded = True

    def expand(self, dtype: torch.dtype) -> None:
        """Once it is loaded: make the weight plain, in the model's dtype, and give back what it was loaded in."""
        held = self.matrix
        if held is not None and not held.is_mkldnn:
            return
        device = next(x.device for x in (*self.parameters(), *self.buffers()))
        self._hold(self.multiply(torch.eye(self.inputs.width, dtype=dtype, device=device)).t().contiguous())

    def _hold(self, weight: Tensor) -> None:
        sources = [source for part in self.parts for source in cast(Part, part).sources]
        plain = Part(self.inputs, self.outputs, False, sources)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        self.parts = nn.ModuleList((plain,))


class LatentUp(PlainColumnParallel):
    """From a latent to keys without a position and values, of this rank's heads. Two sources: keys' [heads, latent,
    nope], and values' [heads, value, latent]."""

    def __init__(self, sizes: LatentSizes, mesh: Mesh):
        heads = even(sizes.heads, mesh.tensor.rank, mesh.tensor.size)
        super().__init__(whole(sizes.latent), (scaled(heads, sizes.nope + sizes.value),), bias=False)
        self.heads, self._shard, self._nope, self._value = heads.width, heads, sizes.nope, sizes.value

    def build(self, sources: Sequence[Source], format_of: ChooseFormat) -> None:
        if len(sources) == 2:
            keys, values = sources
            self.parts.append(HeadMatrices(self._shard, self.inputs, self._nope, "eio", keys))
            self.parts.append(HeadMatrices(self._shard, self.inputs, self._value, "eoi", values))
            return
        super().build(sources, format_of)

    def expand(self, dtype: torch.dtype) -> None:
        if not isinstance(self.parts[0], HeadMatrices):
            return super().expand(dtype)
        keys, values = (cast(HeadMatrices, part).weight.data for part in self.parts)
        self._hold(torch.cat((keys.mT, values), 1).flatten(0, 1))

    @property
    def plain(self) -> Tensor:
        """The weight [heads, nope + value, latent]: attention multiplies with parts of it."""
        assert self.matrix is not None
        return self.matrix.view(self.heads, -1, self.inputs.width)


class LatentAttention(nn.Module):
    """Attributes are named as DeepSeek's checkpoints name their tensors. `q_kv_a_proj` merges q_proj and
    kv_a_proj_with_mqa, `q_a_kv_a_proj` q_a_proj and the same."""

    def __init__(
        self, hidden: int, sizes: LatentSizes, params: AttentionParams, mesh: Mesh, local: int, bias: bool = False
    ):
        """local: the layer's index in this pipeline stage, by which it finds its cache."""
        super().__init__()
        self.sizes, self.params, self.local = sizes, params, local
        projection = LatentProjection(hidden, sizes, mesh, bias)
        if sizes.query_latent:
            heads = even(sizes.heads, mesh.tensor.rank, mesh.tensor.size)
            self.q_a_kv_a_proj = projection
            self.q_a_layernorm = RMSNorm(sizes.query_latent, sizes.eps)
            outputs = scaled(heads, sizes.nope + sizes.rope)
            self.q_b_proj = ColumnParallel(whole(sizes.query_latent), (outputs,), bias=False)
        else:
            self.q_kv_a_proj = projection
        self.kv_a_layernorm = RMSNorm(sizes.latent, sizes.eps)
        self.kv_b_proj = LatentUp(sizes, mesh)
        self.o_proj = RowParallel(sizes.heads * sizes.value, hidden, mesh, bias)

    def cache_spec(self) -> PagedLatent:
        return PagedLatent(self.sizes.latent + self.sizes.rope)

    @property
    def scores(self) -> int:
        """Multiply-adds of a token's queries on this rank with one latent, and of their weights with it."""
        return self.kv_b_proj.heads * (2 * self.sizes.latent + self.sizes.rope)

    @property
    def inner(self) -> int:
        """Elements of a token between this rank's linears, where keys and values are expanded."""
        sizes = self.sizes
        of_head = 2 * sizes.nope + sizes.rope + 2 * sizes.value  # query, key, value, output
        return self.kv_b_proj.heads * of_head + 2 * (sizes.latent + sizes.rope) + sizes.query_latent

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        return self.o_proj(self.attend(h, cos_sin, batch))

    def attend(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Tensor:
        """Values that this rank's heads read, [T, heads * value]. In the last layer only sampled rows continue: h's
        residual stream is reduced to them."""
        q, latents = self._project(h)
        if cos_sin.q_scale is not None:
            q.mul_(cos_sin.q_scale)
        cache, *scales = batch.caches[self.local]
        norm, up = LatentNorm(self.kv_a_layernorm.weight, self.sizes.eps), self.kv_b_proj.plain
        if batch.replayed is None and not batch.ends(self.local):
            return store_and_attend(q, latents, norm, cos_sin, cache, up, batch, self.params, *scales)
        rope_and_store_latents(q, latents, norm, cos_sin, cache, batch.slots, *scales)

        def attend(batch: Batch, q: Tensor, out: Tensor | None = None) -> Tensor:
            return latent_attention(q, cache, up, batch, self.params, *scales)

        return batch.mix(h.keep, self.local, q.shape[1], self.sizes.value, attend, q)

    def _project(self, h: Normed) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, nope + rope] of this rank's heads, latents [T, latent + rope]."""
        if self.sizes.query_latent:
            q, latents = self.q_a_kv_a_proj(h)
            q = self.q_b_proj(self.q_a_layernorm(q))
        else:
            q, latents = self.q_kv_a_proj(h)
        return q.view(len(q), -1, self.sizes.nope + self.sizes.rope), latents
