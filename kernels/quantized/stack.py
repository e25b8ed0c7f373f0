"""Quantised weights of several experts as one: a codec's packed form of [E * P, I].

P is an expert's outputs O, filled up with zeros to whole blocks of 16, as all packed forms have them. So an expert is
an equal part of each tensor of the packed form, and what reads the outputs of one weight reads an expert's as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import host_memory
from . import target
from .codec import Codec
from .linear import dequantize
from .packed_layouts import N_TILE

Encoded = Callable[[int], Sequence[Tensor]]  # the encoded tensors of the next n experts, [n * O, ...] each


class Stack(NamedTuple):
    """Weights [E, O, I]."""

    packed: Any  # of [E * P, I]
    shape: tuple[int, int, int]

    @property
    def tensors(self) -> list[Tensor]:
        return [one for one in self.packed if isinstance(one, Tensor)]

    def expert(self, index: int, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] of one."""
        first = index * padded(self.shape[1])
        return dequantize(self.packed, dtype, first, first + self.shape[1])

    def plain(self, dtype: torch.dtype) -> Tensor:
        """All weights [E, O, I], contiguous."""
        return self.some(0, self.shape[0], dtype)

    def some(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Experts first to last: [last - first, O, I], contiguous."""
        _, outputs, inputs = self.shape
        room = padded(outputs)
        whole = dequantize(self.packed, dtype, first * room, last * room).view(-1, room, inputs)
        return whole[:, :outputs].contiguous()


def padded(outputs: int) -> int:
    """P, the outputs that an expert has room for."""
    return -(-outputs // N_TILE) * N_TILE


def stack(
    codec: Codec, encoded: Encoded, shape: tuple[int, int, int], at_once: int = 1, in_host: bool = False
) -> Stack:
    """Packs so many experts after the others, the last perhaps fewer, so that no more of them are there twice.

    encoded: of the i-th of these parts, from 0 on. in_host: the stack is for CPUs, in host memory, whatever the device
    that encodes and packs; pinned, where that is a GPU.
    """
    return split_for_host(codec, encoded, shape, at_once, in_host, 0)[1]


def split_for_host(
    codec: Codec, encoded: Encoded, shape: tuple[int, int, int], at_once: int, in_host: bool, first: int
) -> tuple[Stack, Stack]:
    """`stack` of the first experts and of the others, in one form. The first stay on the device that packs them."""
    parts = (range(first), False), (range(first, shape[0]), in_host)
    for form in codec.FORMS:
        both = _packed(form, encoded, shape, at_once, in_host, parts)
        if both:
            one, other = (Stack(packed, (len(some), *shape[1:])) for packed, (some, _) in zip(both, parts, strict=True))
            return one, other
    raise ValueError(f"{codec} packs the weights of {shape[0]} experts into several forms")


def _packed(
    form: Callable[..., Any],
    encoded: Encoded,
    shape: tuple[int, int, int],
    at_once: int,
    in_host: bool,
    parts: Sequence[tuple[range, bool]],
) -> list[Any]:
    """Packs each part: its experts, and whether in host memory. Empty: not all experts' weights have one form."""
    made: Any = None
    rooms: list[list[Any]] = []
    experts, padded_outputs = shape[0], padded(shape[1])
    for first in range(0, experts, at_once):
        count = min(at_once, experts - first)
        filled = [_filled(x, count, padded_outputs) for x in encoded(first // at_once)]
        with target.packed_for("cpu" if in_host else ""):
            whole = form(*filled)
        one = type(whole)(*(x.unflatten(0, (count, -1)) if isinstance(x, Tensor) else x for x in whole))
        if "outputs" in one._fields:
            one = one._replace(outputs=padded_outputs)
        if made is None:
            made = one
            rooms = [[_room(x, len(some), host) if isinstance(x, Tensor) else x for x in one] for some, host in parts]
        if not _alike(one, made):
            _wait(made, in_host)
            return []
        for (some, _), room in zip(parts, rooms, strict=True):
            begin, end = max(first, some.start), min(first + count, some.stop)
            for to, x in zip(room, one, strict=True):
                if isinstance(x, Tensor) and begin < end:
                    mine = x[begin - first : end - first]
                    to[begin - some.start : end - some.start].copy_(mine, non_blocking=True)
    _wait(made, in_host)
    return [flat(type(made), room, len(some) * padded_outputs) for (some, _), room in zip(parts, rooms, strict=True)]


def flat(kind: type[Any], room: Sequence[Any], outputs: int) -> Any:
    """A packed form of tensors [experts, ...]."""
    made = kind(*(x.flatten(0, 1) if isinstance(x, Tensor) else x for x in room))
    return made._replace(outputs=outputs) if "outputs" in made._fields else made


def _room(x: Tensor, experts: int, in_host: bool) -> Tensor:
    """Memory for so many experts' tensors like x [n, ...]."""
    shape = experts, *x.shape[1:]
    return host_memory.zeros(shape, x.dtype, pin=True) if in_host and x.is_cuda else x.new_empty(shape)


def _wait(made: Any, in_host: bool) -> None:
    """Until copies from a GPU to the host are done."""
    if in_host and any(isinstance(x, Tensor) and x.is_cuda for x in made):
        torch.cuda.synchronize()


def _filled(x: Tensor, count: int, outputs: int) -> Tensor:
    """x [count * O, ...] → [count * outputs, ...]."""
    more = count * outputs - len(x)
    if not more:
        return x
    each = x.unflatten(0, (count, -1))
    return pad(each, (*(0,) * (2 * x.dim() - 1), more // count)).flatten(0, 1)


def _alike(one: Any, other: Any) -> bool:
    """Whether experts of both look alike, [n, ...] each."""
    if type(one) is not type(other):
        return False
    pairs = zip(one, other, strict=False)
    return all(a.shape[1:] == b.shape[1:] if isinstance(a, Tensor) else a == b for a, b in pairs)
