"""The gated activation of a feed-forward layer (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from . import jit
from .cpu import one_core

THREADS = 128


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up [T, I], where x [T, 2 I] is gate beside up; computed in f32. x may be overwritten."""
    if x.is_cuda:
        return silu_mul_cuda(x)
    if x.is_contiguous() and (compiled := one_core(x)):
        y = x.new_empty(len(x), x.shape[1] // 2)
        compiled.silu_mul(x.numpy(), y.numpy())
        return y
    return silu_mul_reference(x)


def silu_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate.float()).mul_(up).to(x.dtype)


def silu_mul_cuda(x: Tensor) -> Tensor:
    x = x.contiguous()
    width = x.shape[1] // 2
    out = x.new_empty(len(x), width)
    vector = jit.vector(x, width)
    kernel = jit.kernel("activation", "silu_mul", x.dtype, V=vector)
    kernel((-(-width // (THREADS * vector)), len(x), 1), THREADS, x, out, width)
    return out
