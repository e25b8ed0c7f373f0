"""Operations after the head's GEMM: a factor on the logits, a soft cap (Gemma 2, arXiv 2408.00118), and padding."""

from __future__ import annotations

from torch import Tensor

from .. import jit
from ..cpp import ops

THREADS = 256


def finish_logits(x: Tensor, present: int, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
    """scale * x, or softcap * tanh(scale * x / softcap), and -inf from column `present` on; in f32, rounded once.

    Overwrites x [S, V], which is contiguous, and returns it.
    """
    unchanged = scale == 1.0 and not softcap
    if not len(x) or (unchanged and present == x.shape[1]):
        return x
    if x.is_cuda and not unchanged:
        return finish_logits_cuda(x, present, scale, softcap)
    if ops.takes(x):
        return finish_logits_cpu(x, present, scale, softcap)
    return finish_logits_reference(x, present, scale, softcap)


def finish_logits_reference(x: Tensor, present: int, scale: float, softcap: float) -> Tensor:
    if softcap:
        x.copy_(x.float().mul_(scale / softcap).tanh_().mul_(softcap))
    elif scale != 1.0:
        x.mul_(scale)
    x[:, present:] = float("-inf")
    return x


def finish_logits_cpu(x: Tensor, present: int, scale: float, softcap: float) -> Tensor:
    ops.typed("logits", "finish", x.dtype)(x, *x.shape, present, float(scale), float(softcap))
    return x


def finish_logits_cuda(x: Tensor, present: int, scale: float, softcap: float) -> Tensor:
    rows, width = x.shape
    vector = jit.vector(x, width)
    kernel = jit.kernel("logits", "finish", x.dtype, V=vector)
    kernel((-(-width // (THREADS * vector)), rows, 1), THREADS, x, width, present, float(scale), float(softcap))
    return x
