"""Which kind of device reads what is packed: that of the tensors, unless experts in host memory are packed on a GPU.

A GPU encodes and packs much faster than the host. What it packs for the host has the form that CPUs read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import Tensor

_wanted: ContextVar[str] = ContextVar("wanted", default="")


def of(x: Tensor) -> str:
    """The type of the device that will read what `pack` makes of x."""
    return _wanted.get() or x.device.type


@contextlib.contextmanager
def packed_for(kind: str) -> Iterator[None]:
    """Let every codec's `pack` make what this type of device reads, wherever its tensors lie; "": where they lie."""
    token = _wanted.set(kind)
    try:
        yield
    finally:
        _wanted.reset(token)
