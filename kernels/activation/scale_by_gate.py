"""Rows times the sigmoid of a gate that is a linear of one output, in one kernel."""

from __future__ import annotations

from torch import Tensor

from .. import jit


def scale_by_gate(x: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """`activation.scale_by_sigmoid` on GPUs, where gate is h [T, H] times the transpose of the weight
    [1, H]: all contiguous and of one dtype."""
    assert all(one.is_contiguous() and one.dtype == x.dtype for one in (x, h, weight))
    (rows, width), size = x.shape, h.shape[1]
    vector = jit.common_vector((x, h, weight), size, width)
    sizes = dict(N=size, WIDTH=width, V=vector, THREADS=min(max(-(-size // vector // 32) * 32, 32), 256))
    kernel = jit.kernel("scale_by_gate", "scale_by_gate", x.dtype, **sizes)
    kernel((rows, 1, 1), sizes["THREADS"], x, h, weight)
    return x
