"""Quantised weights of several experts as one: a codec's packed form of [E * P, I].

P is an expert's outputs O, filled up with zeros to whole blocks of 16, as all packed forms have them. So an expert is
an equal part of each tensor of the packed form, and what reads the outputs of one weight reads an expert's as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16  # outputs that packed forms keep together
Encoded = Callable[[int], Sequence[Tensor]]  # an expert's encoded tensors, [O, ...] each


class Codec(Protocol):
    """A file of this folder. One whose `pack` makes several forms has FORMS: functions like it, to be tried in turn
    until one makes the same form of all experts' weights."""

    @property
    def pack(self) -> Callable[..., Any]:
        """A weight's encoded tensors → a named tuple, of tensors and what has to be known of them."""

    @property
    def dequantize(self) -> Callable[[Any, torch.dtype, int, int], Tensor]:
        """(packed, dtype, first, last): outputs first to last, [last - first, I]; first is a block's."""


class Stack(NamedTuple):
    """Weights [E, O, I]."""

    codec: Codec
    packed: Any  # of [E * P, I]
    shape: tuple[int, int, int]

    @property
    def tensors(self) -> list[Tensor]:
        return [one for one in self.packed if isinstance(one, Tensor)]

    def expert(self, index: int, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] of one."""
        first = index * padded(self.shape[1])
        return self.codec.dequantize(self.packed, dtype, first, first + self.shape[1])

    def plain(self, dtype: torch.dtype) -> Tensor:
        """All weights [E, O, I], contiguous."""
        experts, outputs, inputs = self.shape
        room = padded(outputs)
        whole = self.codec.dequantize(self.packed, dtype, 0, experts * room).view(experts, room, inputs)
        return whole[:, :outputs].contiguous()


def padded(outputs: int) -> int:
    """P, the outputs that an expert has room for."""
    return -(-outputs // BLOCK) * BLOCK


def stack(codec: Codec, encoded: Encoded, shape: tuple[int, int, int]) -> Stack:
    """Packs one expert after the other, so that no more than one is there twice."""
    for form in getattr(codec, "FORMS", (codec.pack,)):
        packed = _packed(form, encoded, shape)
        if packed is not None:
            return Stack(codec, packed, shape)
    raise ValueError(f"{codec} packs the weights of {shape[0]} experts into several forms")


def _packed(form: Callable[..., Any], encoded: Encoded, shape: tuple[int, int, int]) -> Any:
    """None: not all experts' weights have one form."""
    made: Any = None
    room: list[Any] = []
    for index in range(shape[0]):
        one = form(*(_filled(x, padded(shape[1])) for x in encoded(index)))
        if made is None:
            made = one
            room = [x.new_empty(shape[0], *x.shape) if isinstance(x, Tensor) else x for x in one]
        if not _alike(one, made):
            return None
        for to, x in zip(room, one, strict=True):
            if isinstance(x, Tensor):
                to[index] = x
    whole = type(made)(*(x.flatten(0, 1) if isinstance(x, Tensor) else x for x in room))
    return whole._replace(outputs=shape[0] * padded(shape[1])) if "outputs" in whole._fields else whole


def _filled(x: Tensor, outputs: int) -> Tensor:
    return pad(x, (*(0,) * (2 * x.dim() - 1), outputs - len(x))) if len(x) < outputs else x


def _alike(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=False)
    return type(one) is type(other) and all(a.shape == b.shape if isinstance(a, Tensor) else a == b for a, b in pairs)
