"""The gated delta net (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464) and Kimi delta attention (Kimi Team 2025,
arXiv 2510.26692): linear attention with a recurrent state.

A tensor group splits the key heads, and with each the value heads that it serves. What a layer keeps of a sequence is
no block of tokens but a row's: `RecurrentState`.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import MODEL, USAGE, FatalError
from ....kernels.recurrent.gated_delta import DeltaSizes, Gates, causal_conv, gated_delta, gated_norm, ungroup
from ..batch import Batch
from ..cache_spec import RecurrentState
from ..shard import Shard, even, scaled, whole
from ..weights.slicing import Field, Ratio, ShardedModule, parameter
from .linear import ColumnParallel, RowParallel
from .norm import RMSNorm
from .residual import Normed, Partial


class DeltaNetShape(NamedTuple):
    """Shape of a model's gated delta nets."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # tokens that the convolution reads, this one included
    floor: float = 0.0  # of the decays' logarithms, as of Gates


class CausalConv(ShardedModule):
    """The convolution's weight of this rank's channels, such as queries, keys and values."""

    fields = Field("weight", "obi"), Field("bias", "o")

    def __init__(self, outputs: tuple[Shard, ...], taps: int, bias: bool = False):
        super().__init__()
        self.outputs, self.inputs = outputs, whole(taps)
        width = sum(shard.width for shard in outputs)
        self.weight = parameter(width, 1, taps)
        self.bias = parameter(width) if bias else None

    @property
    def columns(self) -> int:
        """Tokens that it looks back."""
        return self.inputs.width - 1

    def forward(self, x: Tensor, state: Tensor, batch: Batch, silu: bool = True) -> Tensor:
        return causal_conv(x, self.weight[:, 0], state, batch, self.bias, silu)


class Decay(ShardedModule):
    """How fast each value head forgets; checkpoints have these without a module of their own."""

    fields = Field("A_log", "o", torch.float32), Field("dt_bias", "o", torch.float32)

    def __init__(self, heads: Shard):
        super().__init__()
        self.outputs = (heads,)
        self.A_log = parameter(heads.width)
        self.dt_bias = parameter(heads.width)


class ChannelDecay(Decay):
    """How fast each channel of a value head's key is forgotten."""

    def __init__(self, heads: Shard, channels: int, axes: str):
        """axes: of A_log in checkpoints, as of Field."""
        super().__init__(heads)
        self.fields = (
            Field("A_log", axes, torch.float32),
            Field("dt_bias", "o", torch.float32, ratios={"o": Ratio(channels)}),
        )
        shape = [heads.width if axis == "o" else 1 for axis in axes]
        for name, one in (("A_log", shape), ("dt_bias", [heads.width * channels])):
            setattr(self, name, parameter(*one))


class GatedDeltaNet(nn.Module):
    """Attributes are named as checkpoints name their tensors. A subclass defines how they hold the projections."""

    SILU: ClassVar[bool] = True  # the outputs' gate; else a sigmoid

    def __init__(self, hidden: int, shape: DeltaNetShape, eps: float, mesh: Mesh, local: int):
        """local: the layer's index in this pipeline stage, by which it finds its states. Raises FatalError where value
        heads cannot share key heads evenly, and where ranks would have different numbers of heads."""
        super().__init__()
        rank, ranks = mesh.tensor.rank, mesh.tensor.size
        _check(shape, ranks)
        self.each = shape.value_heads // shape.key_heads  # value heads of a key head
        self.heads = even(shape.key_heads, rank, ranks)
        values = scaled(self.heads, self.each)
        self.sizes = DeltaSizes(self.heads.width, values.width, shape.key_dim, shape.value_dim)
        self.keys, self.values = scaled(self.heads, shape.key_dim), scaled(values, shape.value_dim)
        self.local, self.floor = local, shape.floor
        self.conv1d = CausalConv((self.keys, self.keys, self.values), shape.taps)
        self.decay = self._make_decay(values)
        self._make_projections(hidden, values)
        self.norm = RMSNorm(shape.value_dim, eps)
        self.out_proj = RowParallel(self.values.size, hidden, mesh)

    def _make_decay(self, values: Shard) -> Decay:
        """values: this rank's value heads."""
        return Decay(values)

    def _make_projections(self, hidden: int, values: Shard) -> None:
        """values: this rank's value heads."""
        raise NotImplementedError

    def project(self, h: Normed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv [T, channels], z [T, value heads * value dim], b [T, value heads] and a [T, value heads * decays]."""
        raise NotImplementedError

    def cache_spec(self) -> RecurrentState:
        sizes = self.sizes
        return RecurrentState(self.conv1d.columns, sizes.channels, sizes.value_heads, sizes.key_dim, sizes.value_dim)

    @property
    def inner(self) -> int:
        """Elements of a token between this rank's linears. Chunks are computed in f32, which counts twice."""
        sizes = self.sizes
        chunks = 4 * sizes.key_dim + 4 * sizes.value_dim
        if isinstance(self.decay, ChannelDecay):
            chunks += 8 * sizes.key_dim
        return 2 * (sizes.channels + sizes.values) + 2 * sizes.value_heads * chunks

    def forward(self, h: Normed, batch: Batch) -> Partial:
        """In the last layer only sampled rows continue: h's residual stream is reduced to them."""
        qkv, z, b, a = self.project(h)
        of_heads = self.sizes.value_heads, self.sizes.value_dim
        out, z = batch.reduced(h.keep, self.local, batch.run(*of_heads, self._mix, qkv, b, a), z)
        out, z = out.unflatten(1, of_heads), z.unflatten(1, of_heads)
        out = gated_norm(out, z, self.norm.weight, self.norm.eps, self.SILU)
        return self.out_proj(out.flatten(1))

    def _mix(self, batch: Batch, qkv: Tensor, b: Tensor, a: Tensor, out: Tensor | None = None) -> Tensor:
        """The convolution and what heads read of the states, [T, value heads, value dim]."""
        convolution, state = batch.caches[self.local]
        qkv = self.conv1d(qkv, convolution, batch)
        gates = Gates(b, a, self.decay.A_log.flatten(), self.decay.dt_bias, self.floor)
        return gated_delta(qkv, gates, state, batch, self.sizes)


def _check(shape: DeltaNetShape, ranks: int) -> None:
    if shape.value_heads % shape.key_heads:
        raise FatalError(
            f"config.json: linear_num_value_heads {shape.value_heads} is no multiple of linear_num_key_heads "
            f"{shape.key_heads}",
            MODEL,
        )
    if shape.key_heads % ranks:
        raise FatalError(
            f"--tp {ranks} does not divide the {shape.key_heads} key heads of this model's gated delta nets: "
            "choose a divisor",
            USAGE,
        )


class GroupedDeltaNet(GatedDeltaNet):
    """The net of checkpoints that hold all of a key head together (Qwen3-Next): its query, key, values and gates of
    values, and in another linear its values' b and a."""

    def _make_projections(self, hidden: int, values: Shard) -> None:
        _, _, key, value = self.sizes
        self.in_proj_qkvz = ColumnParallel(
            whole(hidden), (scaled(self.heads, 2 * key + 2 * self.each * value),), bias=False
        )
        self.in_proj_ba = ColumnParallel(whole(hidden), (scaled(self.heads, 2 * self.each),), bias=False)

    def project(self, h: Normed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return ungroup(self.in_proj_qkvz(h), self.in_proj_ba(h), self.sizes)


class PlainDeltaNet(GatedDeltaNet):
    """The net of checkpoints that hold queries, keys and values one after the other, and the rest apart (Qwen3.5).
    `in_proj_ba` merges in_proj_b and in_proj_a."""

    def _make_projections(self, hidden: int, values: Shard) -> None:
        self.in_proj_qkv = ColumnParallel(whole(hidden), (self.keys, self.keys, self.values), bias=False)
        self.in_proj_z = ColumnParallel(whole(hidden), (self.values,), bias=False)
        self.in_proj_ba = ColumnParallel(whole(hidden), (values, values), bias=False)

    def project(self, h: Normed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, a = self.in_proj_ba(h).chunk(2, 1)
        return self.in_proj_qkv(h), self.in_proj_z(h), b, a


class KimiDeltaAttention(GatedDeltaNet):
    """The net whose keys' channels each have a decay (Kimi Linear). Decays and output gates come of narrow projections:
    `in_proj` merges these with q_proj, k_proj, v_proj and b_proj."""

    SILU = False
    DECAY_AXES: ClassVar[str] = "bbob"  # of A_log in checkpoints, as of Field
    # Names here → the names of the parts in checkpoints, and names there → names here.
    MERGED: ClassVar[dict[str, tuple[str, ...]]] = {
        "in_proj": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
        "out_proj": ("o_proj",),
    }
    RENAMED: ClassVar[dict[str, str]] = {
        "self_attn.o_norm.": "self_attn.norm.",
        "self_attn.A_log": "self_attn.decay.A_log",
        "self_attn.dt_bias": "self_attn.decay.dt_bias",
    }

    def _make_decay(self, values: Shard) -> Decay:
        return ChannelDecay(values, self.sizes.key_dim, self.DECAY_AXES)

    def _make_projections(self, hidden: int, values: Shard) -> None:
        self.narrow = whole(self.sizes.value_dim)
        outputs = self.keys, self.keys, self.values, values, self.narrow, self.narrow
        self.in_proj = ColumnParallel(whole(hidden), outputs, bias=False)
        self.f_b_proj = ColumnParallel(self.narrow, (scaled(values, self.sizes.key_dim),), bias=False)
        self.g_b_proj = ColumnParallel(self.narrow, (self.values,), bias=False)

    def project(self, h: Normed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        narrow = self.narrow.width
        qkv, b, f, g = self.in_proj(h).split([self.sizes.channels, self.sizes.value_heads, narrow, narrow], 1)
        return qkv, self.g_b_proj(g.contiguous()), b, self.f_b_proj(f.contiguous())


class WideDeltaAttention(KimiDeltaAttention):
    """Kimi delta attention whose decays and output gates come of the hidden state itself (Ling 3). `in_proj` merges all
    that reads it."""

    DECAY_AXES = "o"
    MERGED = KimiDeltaAttention.MERGED | {"in_proj": ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "g_proj")}

    def _make_projections(self, hidden: int, values: Shard) -> None:
        outputs = self.keys, self.keys, self.values, values, scaled(values, self.sizes.key_dim), self.values
        self.in_proj = ColumnParallel(whole(hidden), outputs, bias=False)

    def project(self, h: Normed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        widths = [output.width for output in self.in_proj.outputs[3:]]
        qkv, b, f, g = self.in_proj(h).split([self.sizes.channels, *widths], 1)
        return qkv, g.contiguous(), b, f
