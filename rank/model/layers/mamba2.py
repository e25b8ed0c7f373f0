"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a recurrent state that forgets by a scalar for each head.

A tensor group splits the heads, and with them the groups that share keys and queries; ranks that have heads of one
group each have its keys and queries. What a layer keeps of a sequence is a row's: `RecurrentState`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import MODEL, USAGE, FatalError
from ....kernels.activation.activation import product
from ....kernels.recurrent.gated_delta import CHUNK
from ....kernels.recurrent.ssd import SsdSizes, TimeSteps, ssd, ssd_norm
from ..batch import Batch
from ..cache_spec import RecurrentState
from ..shard import Shard, even, key_heads, scaled, whole
from ..weights.slicing import Field, ShardedModule, parameter
from .attention import ShardedRMSNorm
from .gated_delta_net import CausalConv
from .linear import ColumnParallel, RowParallel
from .residual import Normed, Partial


class Mamba2Shape(NamedTuple):
    """Shape of a model's Mamba-2 layers."""

    heads: int
    head_dim: int
    groups: int
    state: int  # elements of a key
    taps: int  # tokens that the convolution reads, this one included
    conv_bias: bool = True
    bias: bool = False  # of both linears
    normed: bool = True
    gate_first: bool = True  # the norm is of what was gated


class Scan(ShardedModule):
    """Numbers of each head; checkpoints have these without a module of their own."""

    fields = tuple(Field(name, "o", torch.float32) for name in ("A_log", "dt_bias", "D"))

    def __init__(self, heads: Shard):
        super().__init__()
        self.outputs = (heads,)
        self.A_log, self.dt_bias, self.D = (parameter(heads.width) for _ in range(3))


# Names in checkpoints → names here.
RENAMED = {f"mamba.{field.name}": f"mamba.scan.{field.name}" for field in Scan.fields}


class Factors:
    """Numbers that rows [T, ...] are multiplied with, each a part of the columns as wide as given."""

    def __init__(self, *parts: tuple[float, int]):
        self._parts = parts
        self._row: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._row is None:
            row = torch.cat([torch.full((width,), factor) for factor, width in self._parts])
            self._row = row.to(x.device, x.dtype)
        return product(x, self._row.expand_as(x))


class Mamba2(nn.Module):
    """Attributes are named as checkpoints name their tensors."""

    def __init__(
        self,
        hidden: int,
        shape: Mamba2Shape,
        eps: float,
        mesh: Mesh,
        local: int,
        factors: Sequence[float] | None = None,
    ):
        """local: the layer's index in this pipeline stage, by which it finds its states. factors: on the first linear's
        parts, z, x, keys, queries and time steps. Raises FatalError where heads cannot share groups evenly, and where
        ranks cannot share either."""
        super().__init__()
        rank, ranks = mesh.tensor.rank, mesh.tensor.size
        _check(shape, ranks)
        heads, groups = even(shape.heads, rank, ranks), key_heads(shape.groups, rank, ranks)
        values, keys = scaled(heads, shape.head_dim), scaled(groups, shape.state)
        self.sizes = SsdSizes(groups.width, heads.width, shape.state, shape.head_dim)
        self.shape, self.eps, self.local, self.group = shape, eps, local, mesh.tensor
        self.first_group = groups.start
        parts = values, values, keys, keys, heads
        self.in_proj = ColumnParallel(whole(hidden), parts, shape.bias)
        widths = [part.width for part in parts]
        self.factors = Factors(*zip(factors, widths, strict=True)) if factors else None
        self.conv1d = CausalConv((values, keys, keys), shape.taps, shape.conv_bias)
        self.scan = Scan(heads)
        if shape.normed:
            self.norm = ShardedRMSNorm(values, eps)
        self.out_proj = RowParallel(values.size, hidden, mesh, shape.bias)

    def cache_spec(self) -> RecurrentState:
        sizes = self.sizes
        return RecurrentState(self.conv1d.columns, sizes.channels, sizes.heads, sizes.state, sizes.head_dim)

    @property
    def inner(self) -> int:
        """Elements of a token between this rank's linears. Chunks are computed in f32, which counts twice, and have
        the decays between a chunk's tokens."""
        sizes = self.sizes
        return 2 * (sizes.channels + sizes.values) + 2 * sizes.heads * (3 * sizes.head_dim + 2 * CHUNK)

    def forward(self, h: Normed, batch: Batch) -> Partial:
        """In the last layer only sampled rows continue: h's residual stream is reduced to them."""
        return self.out(*batch.reduced(h.keep, self.local, *self.mix(h, batch)))

    def mix(self, h: Normed, batch: Batch) -> tuple[Tensor, Tensor]:
        """The heads' outputs and their gates: [T, values] each."""
        sizes, projected = self.sizes, self.in_proj(h)
        if self.factors is not None:
            projected = self.factors(projected)
        z, xbc, dt = projected.split([sizes.values, sizes.channels, sizes.heads], 1)
        return batch.run(sizes.heads, sizes.head_dim, self._mix, xbc, dt), z

    def out(self, y: Tensor, z: Tensor) -> Partial:
        weight = self.norm.weight if self.shape.normed else None
        shared = self.group.size // self.shape.groups  # ranks that have heads of one group
        if weight is None or shared < 2:
            gated = ssd_norm(y, z, weight, self.eps, self.sizes.groups, self.shape.gate_first)
        else:
            gated = self._norm_shared(y, z, weight, shared)
        return self.out_proj(gated)

    def _norm_shared(self, y: Tensor, z: Tensor, weight: Tensor, shared: int) -> Tensor:
        """ssd_norm where a group's heads are several ranks': they add up their sums of squares."""
        wide = y.float()
        gate = torch.nn.functional.silu(z.float())
        wide = wide * gate if self.shape.gate_first else wide
        means = wide.new_zeros(len(y), self.shape.groups)
        means[:, self.first_group] = wide.square().mean(1) / shared
        mean = self.group.all_reduce(means)[:, self.first_group, None]
        normed = wide * (mean + self.eps).rsqrt() * weight.float()
        return (normed if self.shape.gate_first else normed * gate).to(y.dtype)

    def _mix(self, batch: Batch, xbc: Tensor, dt: Tensor, out: Tensor | None = None) -> Tensor:
        """The convolution and what heads read of the states, [T, heads, head dim]."""
        convolution, state = batch.caches[self.local][-2:]
        xbc = self.conv1d(xbc, convolution, batch)
        scan = self.scan
        return ssd(xbc, TimeSteps(dt, scan.A_log, scan.dt_bias, scan.D), state, batch, self.sizes)


NO_LIMIT = math.inf, "Infinity", {"__float__": "Infinity"}  # as files write infinity
UNREACHED = 1e9  # seconds of a step: none is as long


def check_time_steps(limits: Any) -> None:
    """Raises FatalError where config.json's `time_step_limit`, the least and the most that time steps may be, clips
    any."""
    if limits is None:
        return
    least, most = limits if isinstance(limits, list) and len(limits) == 2 else (None, None)
    if least != 0 or not (most in NO_LIMIT or (isinstance(most, int | float) and most >= UNREACHED)):
        raise FatalError(f"config.json: time_step_limit {limits!r} is not supported: time steps are not clipped", MODEL)


def _check(shape: Mamba2Shape, ranks: int) -> None:
    if shape.heads % shape.groups:
        raise FatalError(
            f"config.json: {shape.heads} heads of Mamba-2 layers cannot share {shape.groups} groups evenly", MODEL
        )
    if shape.heads % ranks or (shape.groups % ranks and ranks % shape.groups):
        raise FatalError(
            f"--tp {ranks} does not fit the {shape.heads} heads in {shape.groups} groups of this model's Mamba-2 "
            "layers: choose a divisor of both, or a multiple of the groups",
            USAGE,
        )
