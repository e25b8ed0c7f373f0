"""Hyper-connections (Zhu et al. 2024, arXiv 2409.19606), manifold-constrained (Xie et al. 2025, arXiv 2512.24880).

The residual is several streams of the hidden size side by side. Each sublayer reads one weighted sum of them; its
output is added to each with a weight, and the streams are mixed by a matrix whose rows and columns add up to 1. All
weights depend on the streams of the same token and are computed in f32.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..shard import whole
from ..weights.slicing import Field, ShardedModule, parameter
from .norm import RMSNorm
from .residual import Normed, ResidualStream


class HyperSizes(NamedTuple):
    """Sizes and constants of a model's hyper-connections."""

    streams: int
    hidden: int
    iterations: int  # by which the mixing matrix is normalised
    eps: float  # added to what is divided by, and to weights
    norm_eps: float


class Mixing(NamedTuple):
    """How a sublayer's output joins a token's streams."""

    output: Tensor  # [T, streams]: its weight in each
    streams: Tensor  # [T, streams, streams]: of each old one (axis 1) in each new one (axis 2)


class HyperStream(ResidualStream):
    """A residual stream of several streams side by side: [T, streams * H]."""

    mixing: Mixing | None = None  # of what is added next; HyperNormed sets it

    def keep(self, rows: Tensor) -> None:
        """From here on it has only these rows [S] int64."""
        self.value = self.read()[rows]
        if self.mixing is not None:
            self.mixing = Mixing(*(x[rows] for x in self.mixing))

    def _added(self, x: Tensor) -> Tensor:
        assert self.mixing is not None
        output, streams = (one.to(x.dtype) for one in self.mixing)
        old = self.value.unflatten(1, (output.shape[1], -1))
        return torch.baddbmm(output[:, :, None] * x[:, None], streams.mT, old).flatten(1)


class HyperNormed(Normed):
    """The norm of the weighted sum that a sublayer reads, before it is computed."""

    stream: HyperStream

    def __init__(self, connection: HyperConnection, norm: RMSNorm, stream: ResidualStream):
        assert isinstance(stream, HyperStream)
        super().__init__(norm, stream)
        self.connection = connection

    def begin(self) -> None:
        self.stream.begin()

    def keep(self, rows: Tensor) -> None:
        value = self.tensor()
        self._value = value[rows]
        self.stream.keep(rows)

    def packed_linear(self, packed: object, gate: str = "", bias: Tensor | None = None) -> Tensor | None:
        return None

    def _compute(self) -> Tensor:
        collapsed, self.stream.mixing = self.connection(self.stream.read())
        return self.norm.norm(collapsed)


class Scale(ShardedModule):
    """Factors on the parts of a projection."""

    fields = (Field("scale", "o", torch.float32),)

    def __init__(self, count: int):
        super().__init__()
        self.outputs = (whole(count),)
        self.scale = parameter(count)


class Projection(ShardedModule):
    """Logits of weights, linear in a token's normed streams."""

    fields = Field("fn", "oi", torch.float32), Field("base", "o", torch.float32)

    def __init__(self, sizes: HyperSizes, *parts: int):
        """parts: outputs that have a factor of their own."""
        super().__init__()
        self.sizes, self.parts, width = sizes, parts, sizes.streams * sizes.hidden
        self.inputs, self.outputs = whole(width), (whole(sum(parts)),)
        self.fn = parameter(sum(parts), width)
        self.base = parameter(sum(parts))
        self.factors = Scale(len(parts))

    def logits(self, value: Tensor) -> tuple[Tensor, ...]:
        """value: [T, streams * H]. Returns [T, part] f32 for each part."""
        wide = value.float()
        projected = (wide @ self.fn.t()) * (wide.square().mean(1, keepdim=True) + self.sizes.norm_eps).rsqrt()
        each = zip(projected.split(self.parts, 1), self.factors.scale, self.base.split(self.parts), strict=True)
        return tuple(torch.addcmul(base, one, scale) for one, scale, base in each)

    def collapse(self, value: Tensor, logits: Tensor) -> Tensor:
        """The sum of the streams, each with its weight: [T, H]."""
        weights = logits.sigmoid() + self.sizes.eps
        return (weights[:, :, None] * value.unflatten(1, (self.sizes.streams, -1))).sum(1).to(value.dtype)


class HyperConnection(Projection):
    """Mixes the streams into what one sublayer reads, and its output into them."""

    RENAMED: ClassVar[dict[str, str]] = {  # names in checkpoints → names here
        ".hc_attn_scale": ".hc_attn.factors.scale", ".hc_ffn_scale": ".hc_ffn.factors.scale",
        ".hc_attn_": ".hc_attn.", ".hc_ffn_": ".hc_ffn.",
    }  # fmt: skip

    def __init__(self, sizes: HyperSizes):
        super().__init__(sizes, sizes.streams, sizes.streams, sizes.streams**2)

    def forward(self, value: Tensor) -> tuple[Tensor, Mixing]:
        read, output, streams = self.logits(value)
        return self.collapse(value, read), Mixing(2 * output.sigmoid(), self._normalised(streams))

    def _normalised(self, logits: Tensor) -> Tensor:
        """A matrix [T, streams, streams] whose rows and columns add up to 1 (Sinkhorn and Knopp 1967)."""
        eps = self.sizes.eps
        matrix = logits.unflatten(1, (self.sizes.streams, -1)).softmax(2) + eps
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        for _ in range(self.sizes.iterations - 1):
            matrix = matrix / (matrix.sum(2, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        return matrix


class HyperHead(Projection):
    """The sum of the streams that the final norm reads."""

    def __init__(self, sizes: HyperSizes):
        super().__init__(sizes, sizes.streams)

    def forward(self, value: Tensor) -> Tensor:
        (logits,) = self.logits(value)
        return self.collapse(value, logits)


class HyperMean(nn.Module):
    """The mean of the streams, which the final norm reads."""

    def __init__(self, sizes: HyperSizes):
        super().__init__()
        self.streams = sizes.streams

    def forward(self, value: Tensor) -> Tensor:
        return value.unflatten(1, (self.streams, -1)).mean(1)
