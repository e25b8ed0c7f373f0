"""DeepSeek-V4's attention (DeepSeek-AI 2026, section 2.3): the newest tokens, and compressed entries of all.

Over a tensor group heads are split, and with them the groups of heads whose outputs are projected together; keys,
entries and the indexer are computed and cached on every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import USAGE, FatalError
from ....kernels.attention import compressed
from ....kernels.attention.attention import AttentionParams
from ....kernels.attention.compressed import Compression
from ....kernels.attention.indexer import select
from ....kernels.rope.rope import CosSin, apply_rotary
from ..batch import Batch
from ..cache_spec import CompressedKV
from ..shard import even, scaled, whole
from ..weights.slicing import Field, ShardedModule, parameter
from .attention import Sinks
from .indexer import IndexSizes
from .linear import ColumnParallel, RowParallel
from .mla import PlainColumnParallel
from .norm import RMSNorm
from .residual import Normed, Partial


class CompressedSizes(NamedTuple):
    """Sizes of a layer's attention."""

    heads: int  # of the model
    dim: int  # of a head
    query_latent: int
    groups: int  # of heads, whose outputs have a latent each
    group_latent: int
    eps: float
    compression: Compression | None = None  # None: the layer reads its window alone
    indexer: IndexSizes | None = None  # None: a token reads all entries


class PositionBias(ShardedModule):
    """Added to gates by a token's place in its window."""

    fields = (Field("ape", "io", torch.float32),)

    def __init__(self, rate: int, width: int):
        super().__init__()
        self.inputs, self.outputs = whole(rate), (whole(width),)
        self.ape = parameter(rate, width)


class Compressor(nn.Module):
    """Makes entries of windows. `wkv_wgate` merges wkv and wgate."""

    def __init__(self, hidden: int, compression: Compression, eps: float):
        super().__init__()
        self.compression = compression
        width = whole(compression.width)
        self.wkv_wgate = ColumnParallel(whole(hidden), (width, width), bias=False)
        self.bias = PositionBias(compression.rate, compression.width)
        self.norm = RMSNorm(compression.dim, eps)

    @property
    def channels(self) -> int:
        return 2 * self.compression.width

    def project(self, h: Normed, positions: Tensor) -> Tensor:
        """Values and gates [T, channels] f32."""
        made = self.wkv_wgate(h).float()
        made[:, self.compression.width :] += self.bias.ape[positions % self.compression.rate]
        return made

    def store(self, inputs: Tensor, known: Tensor, cos_sin: CosSin, cache: Tensor, slots: Tensor) -> None:
        """inputs and known: as compressed.Windows has them. cos_sin: of the windows' first tokens."""
        entries = compressed.compress(inputs, known, self.compression).to(cache.dtype)
        compressed.store(_rotated(self.norm(entries), cos_sin), cache, slots)


class Indexer(nn.Module):
    """Chooses the entries that a token reads, by entries of its own."""

    def __init__(self, hidden: int, query_latent: int, sizes: IndexSizes, compression: Compression, eps: float):
        super().__init__()
        self.sizes = sizes
        self.wq_b = ColumnParallel(whole(query_latent), (whole(sizes.heads * sizes.dim),), bias=False)
        self.weights_proj = ColumnParallel(whole(hidden), (whole(sizes.heads),), bias=False)
        self.compressor = Compressor(hidden, compression._replace(dim=sizes.dim), eps)

    def queries(self, q_latent: Tensor, cos_sin: CosSin) -> Tensor:
        """[T, heads, dim]."""
        return _rotated(self.wq_b(q_latent).view(len(q_latent), self.sizes.heads, self.sizes.dim), cos_sin)


class CompressedAttention(nn.Module):
    """Attributes are named as DeepSeek's checkpoints name their tensors. `wq_a_wkv` merges wq_a and wkv."""

    def __init__(self, hidden: int, sizes: CompressedSizes, params: AttentionParams, mesh: Mesh, local: int):
        """local: the layer's index in this pipeline stage, by which it finds its cache. Raises FatalError where ranks
        would have parts of groups."""
        super().__init__()
        if sizes.groups % mesh.tensor.size:
            raise FatalError(
                f"--tp {mesh.tensor.size} does not divide the {sizes.groups} groups of heads of this model: choose a "
                "divisor",
                USAGE,
            )
        self.sizes, self.params, self.local = sizes, params, local
        heads, groups = (even(n, mesh.tensor.rank, mesh.tensor.size) for n in (sizes.heads, sizes.groups))
        self.heads, self.groups = heads.width, groups.width
        outputs = whole(sizes.query_latent), whole(sizes.dim)
        self.wq_a_wkv = ColumnParallel(whole(hidden), outputs, bias=False)
        self.q_norm = RMSNorm(sizes.query_latent, sizes.eps)
        self.kv_norm = RMSNorm(sizes.dim, sizes.eps)
        self.wq_b = ColumnParallel(whole(sizes.query_latent), (scaled(heads, sizes.dim),), bias=False)
        of_group = whole(sizes.heads * sizes.dim // sizes.groups)
        self.wo_a = PlainColumnParallel(of_group, (scaled(groups, sizes.group_latent),), bias=False)
        self.wo_b = RowParallel(sizes.groups * sizes.group_latent, hidden, mesh)
        self.attn_sink = Sinks(heads)
        self.compressor = self.indexer = None
        if sizes.compression is not None:
            self.compressor = Compressor(hidden, sizes.compression, sizes.eps)
            if sizes.indexer is not None:
                self.indexer = Indexer(hidden, sizes.query_latent, sizes.indexer, sizes.compression, sizes.eps)

    @property
    def compressors(self) -> list[Compressor]:
        """The one of keys before the one of index keys."""
        if self.compressor is None:
            return []
        return [self.compressor] if self.indexer is None else [self.compressor, self.indexer.compressor]

    def cache_spec(self) -> CompressedKV:
        sizes, window = self.sizes, self.params.window
        if sizes.compression is None:
            return CompressedKV(sizes.dim, window)
        index, channels = sizes.indexer.dim if sizes.indexer else 0, sum(one.channels for one in self.compressors)
        return CompressedKV(sizes.dim, window, sizes.compression.rate, index, sizes.compression.tokens, channels)

    @property
    def inner(self) -> int:
        """Elements of a token between this rank's linears; inputs of windows are f32, and gathered as often as entries
        are made of them."""
        sizes = self.sizes
        copies = 2 + 2 * (1 + bool(sizes.compression and sizes.compression.overlaps))
        channels = sum(one.channels for one in self.compressors)
        index = sizes.indexer.heads * sizes.indexer.dim if sizes.indexer else 0
        return 3 * self.heads * sizes.dim + 2 * sizes.dim + sizes.query_latent + 2 * copies * channels + 2 * index

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        """In the last layer only sampled rows continue: h's residual stream is reduced to them."""
        batch = batch.of_layer(self.local)
        q, *given = self._project(h, cos_sin, batch)
        if batch.replayed is not None:
            out = batch.run(self.heads, self.sizes.dim, self._store_and_attend, q, *given)
        else:
            self._store(batch, *given)
            out = batch.mix(h.keep, self.local, self.heads, self.sizes.dim, self._attend, q, *given[4:])
        cos, sin = (batch.rows_like(out, x) for x in cos_sin[:2])
        return self._project_out(out.unflatten(1, q.shape[1:]), cos_sin._replace(cos=cos, sin=sin))

    def _store_and_attend(self, batch: Batch, q: Tensor, *given: Tensor, out: Tensor) -> Tensor:
        batch = batch.of_layer(self.local)
        self._store(batch, *given)
        return self._attend(batch, q, *given[4:])

    def _project(self, h: Normed, cos_sin: CosSin, batch: Batch) -> list[Tensor]:
        """Queries [T, heads, dim] and keys [T, dim]; where entries are made their inputs [T, channels] and cosines and
        sines of windows; where they are chosen index queries and weights of their heads."""
        q_latent, kv = self.wq_a_wkv(h).split([self.sizes.query_latent, self.sizes.dim], 1)
        q_latent = self.q_norm(q_latent.contiguous())
        q = self.wq_b(q_latent).view(len(kv), self.heads, self.sizes.dim)
        found = [_rotated(_normed(q, self.sizes.eps), cos_sin), _rotated(self.kv_norm(kv.contiguous()), cos_sin)]
        if (windows := cos_sin.of_window) is not None:
            inputs = [one.project(h, batch.positions) for one in self.compressors]
            found += [torch.cat(inputs, 1), windows.cos, windows.sin]
        if self.indexer is not None:
            found += [self.indexer.queries(q_latent, cos_sin), self.indexer.weights_proj(h)]
        return found

    def _store(
        self, batch: Batch, kv: Tensor, inputs: Tensor | None = None, cos: Tensor | None = None,
        sin: Tensor | None = None, *index: Tensor,
    ) -> None:  # fmt: skip
        """Keys, entries of windows and index keys go to the cache, and inputs to the ring."""
        cache, *others = batch.caches[self.local]
        size = self._block_size(cache)
        blocks, each = batch.slots.div(size, rounding_mode="floor"), cache.shape[1] - size
        compressed.store(kv, cache, torch.where(batch.slots < 0, -1, batch.slots + blocks * each))
        compression = self.sizes.compression
        if compression is None or inputs is None or cos is None or sin is None:
            return
        *keys, ring = others
        windows = compressed.gather_windows(inputs, ring, batch.rows, batch, compression)
        compressed.write_ring(inputs, ring, batch.rows, batch)
        some = windows.tokens
        turn, blocks = CosSin(cos[some], sin[some], interleaved=True), blocks[some]
        place = compressed.tokens_of(batch).position[some] // compression.rate % each
        first = 0
        for one, entries, room in zip(self.compressors, (cache, *keys), (size, 0), strict=False):
            part = windows.inputs[..., first : first + one.channels]
            slots = torch.where(blocks < 0, -1, blocks * entries.shape[1] + room + place)
            one.store(part, windows.known, turn, entries, slots)
            first += one.channels

    def _attend(self, batch: Batch, q: Tensor, *index: Tensor) -> Tensor:
        """[T, heads, dim]. index: queries and weights of the indexer, if the layer has one."""
        cache, *others = batch.caches[self.local]
        params = self.params._replace(sinks=self.attn_sink.weight)
        rate, selection = self.sizes.compression.rate if self.sizes.compression else 0, None
        if index and self.sizes.indexer is not None:
            queries, weights = index
            _, dim, topk, _ = self.sizes.indexer
            selection = select(queries, weights, others[0], batch, topk, dim, stride=rate)
        return compressed.attend(q, cache, batch, params, rate, self._block_size(cache), selection)

    def _block_size(self, cache: Tensor) -> int:
        return compressed.tokens_of_block(cache.shape[1], self.sizes.compression.rate if self.sizes.compression else 0)

    def _project_out(self, out: Tensor, cos_sin: CosSin) -> Partial:
        """out: [T, heads, dim], of rotated keys, which are values too: their rotation is undone relative to a token."""
        out = _rotated(out, cos_sin._replace(sin=-cos_sin.sin))
        weight = self.wo_a.matrix
        assert weight is not None
        by_group = out.view(len(out), self.groups, weight.shape[1]).transpose(0, 1)
        latents = torch.bmm(by_group, weight.view(self.groups, -1, weight.shape[1]).mT)
        return self.wo_b(latents.transpose(0, 1).flatten(1))


def _normed(x: Tensor, eps: float) -> Tensor:
    """The RMS norm over the last axis, without a weight."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def _rotated(x: Tensor, cos_sin: CosSin) -> Tensor:
    """x [T, heads, dim] or [T, dim] with its last elements rotated."""
    plain = x.shape[-1] - cos_sin.cos.shape[-1]
    heads = x if x.dim() == 3 else x[:, None]
    turned = torch.cat((heads[..., :plain], apply_rotary(heads[..., plain:], cos_sin)), -1)
    return turned.view(x.shape)
