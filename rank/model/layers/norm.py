"""Norms, plain and as the norm before a sublayer, which is fused with the residual add.

RMS norm: Zhang and Sennrich 2019, arXiv 1910.07467. Layer norm: Ba, Kiros and Hinton 2016, arXiv 1607.06450.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernels.norm.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ..shard import whole
from ..weights.slicing import Field, ShardedModule, Vector, parameter
from .residual import Normed, PostNormed, ResidualStream


class RowNorm(Vector):
    """A norm over the last axis."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        """offset: is added to the loaded weight; 1 for Gemma and Nemotron, whose checkpoints store weight - 1."""
        super().__init__(whole(size))
        self.eps, self.offset = eps, offset

    def finish(self) -> None:
        if self.offset:
            self.weight.data += self.offset

    def norm(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class RMSNorm(RowNorm):
    @property
    def rms_weight(self) -> Tensor:
        return self.weight

    def norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps, other)


class Ones(ShardedModule):
    """Ones that no checkpoint has, as a norm without a weight needs them: captured steps read them where they are."""

    fields = ()

    def __init__(self, *shape: int, dtype: torch.dtype | None = None):
        """dtype: None for the model's."""
        super().__init__()
        self.outputs, self.dtype = (), dtype
        self.weight = parameter(shape)

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return self.dtype or dtype

    def finish(self) -> None:
        self.weight.data.fill_(1)


class LayerScalar(ShardedModule):
    """A factor on the residual stream after a layer, [1]."""

    fields = (Field("layer_scalar", "o"),)

    def __init__(self) -> None:
        super().__init__()
        self.outputs = (whole(1),)
        self.layer_scalar = parameter(1)


class LayerNorm(RowNorm):
    fields: tuple[Field, ...] = (Field("weight", "o"), Field("bias", "o"))
    rms_weight = None

    def __init__(self, size: int, eps: float, bias: bool = True, offset: float = 0.0):
        """bias: whether there is one; Cohere's have none. offset: as of RowNorm."""
        super().__init__(size, eps, offset)
        self.bias = parameter(size) if bias else None

    def norm(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, other)


class PostNorm(RMSNorm):
    """The norm of a sublayer's output, before it is added to the residual stream."""

    def forward(self, x: Tensor) -> PostNormed:  # type: ignore[override]
        """A lazy norm: the norm before the next sublayer is fused with it."""
        return PostNormed(self, x)


class AddRMSNorm(RMSNorm):
    """The norm before a sublayer. It adds the pending sublayer output to the residual stream first."""

    def forward(self, stream: ResidualStream) -> Normed:  # type: ignore[override]
        """A lazy norm: the linear that reads it computes it, or fuses it."""
        return Normed(self, stream)


class AddLayerNorm(LayerNorm):
    """A pending add and layer norm."""

    def forward(self, stream: ResidualStream) -> Normed:  # type: ignore[override]
        return Normed(self, stream)


def norm(args: Any, rms: type[RMSNorm] = RMSNorm, layer: type[LayerNorm] = LayerNorm) -> RMSNorm | LayerNorm:
    """A norm of the hidden state, as a model's Args say."""
    if args.layer_norms:
        return layer(args.hidden_size, args.layer_norm_eps, args.norm_bias, args.norm_offset)
    return rms(args.hidden_size, args.rms_norm_eps, args.norm_offset)


def add_norm(args: Any) -> RMSNorm | LayerNorm:
    """The norm before a sublayer, as a model's Args say."""
    return norm(args, AddRMSNorm, AddLayerNorm)
