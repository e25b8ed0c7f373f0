"""The protocols of codecs: a weight format's arithmetic, as files and objects of this folder have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class SuperBlock(NamedTuple):
    """How super-blocks of a type lie packed, as kernels read them."""

    super: int  # inputs of a super-block, 32 or 256
    group: int  # inputs of a group, 16 or 32
    bits: int  # of a code as it is kept, 4, 6 or 8
    zero: int  # what all codes have too much
    minima: bool = True  # whether groups have them


class Codec(Protocol):
    """A packer of weights. All packed forms are multiplied and dequantised by linear.py."""

    @property
    def pack(self) -> Callable[..., Any]:
        """A weight's encoded tensors, [outputs, ...] each → a named tuple, of tensors and what has to be known of them,
        as the kernels of the device that reads it take it (target.py)."""

    @property
    def FORMS(self) -> tuple[Callable[..., Any], ...]:
        """Functions like `pack`, to be tried in turn until one makes the same form of all experts' weights."""


class Encoder(Codec, Protocol):
    """A codec that weights are quantised with."""

    @property
    def GROUP(self) -> int:
        """Neighbouring inputs that are encoded together."""

    @property
    def kept_bits(self) -> Callable[[int, torch.device], float]:
        """(inputs, device): bits of a weight as `pack` keeps it there, with its share of the rest."""

    @property
    def encode(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """weight [outputs, inputs] of 16 or 32 bits on any device → the encoded tensors."""
