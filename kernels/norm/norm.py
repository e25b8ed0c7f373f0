"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .. import jit
from ..cpp import ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, which is `weight`'s; computed in f32 and rounded once. A new tensor."""
    if x.is_cuda:
        return rms_norm_cuda(x, weight, eps)
    if x.dim() == 2 and x.stride(1) == 1 and x.dtype == weight.dtype and ops.takes(x):
        return rms_norm_cpu(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum. x and residual [T, H] may be overwritten.

    What is normalised is the sum rounded to x's dtype: a pipeline stage that gets the rounded sum from its
    predecessor computes the same as a model that was not cut there, but for a norm's last bit where a GEMM makes it
    (skinny.normed_linear). other: is added to x before, and that rounded.
    """
    if x.is_cuda:
        return add_rms_norm_cuda(x, residual, weight, eps, other)
    if x.is_contiguous() and residual.is_contiguous() and x.dtype == residual.dtype == weight.dtype and ops.takes(x):
        return add_rms_norm_cpu(x, residual, weight, eps, other)
    if other is not None:
        x = x + other
    return add_rms_norm_reference(x, residual, weight, eps)


def sum_add_rms_norm(
    terms: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum of terms [T, n, H] over n, which is made in f32 and rounded. other: [T, H], or [H] for
    all rows."""
    if terms.is_cuda:
        return sum_add_rms_norm_cuda(terms, residual, weight, eps, other)
    other = None if other is None else other.expand_as(residual)
    return add_rms_norm(terms.float().sum(1).to(terms.dtype), residual, weight, eps, other)


def norm_add_norm(
    x: Tensor, post_weight: Tensor, post_eps: float, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm by `weight` of residual + the norm of x by `post_weight`, and that sum. x and residual [T, H] may be
    overwritten. Both norms and the sum are rounded to x's dtype."""
    if x.is_cuda:
        return norm_add_norm_cuda(x, post_weight, post_eps, residual, weight, eps)
    return add_rms_norm(rms_norm(x, post_weight, post_eps), residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    # Five calls, where torch's own rms_norm makes eight, which takes longer on CPUs.
    scale = vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual.add_(x)
    return rms_norm_reference(total, weight, eps), total


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [T, H], its rows contiguous."""
    y = x.new_empty(x.shape)
    ops.typed("norm", "rms_norm", x.dtype)(x, weight, y, *x.shape, x.stride(0), float(eps))
    return y


def add_rms_norm_cpu(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    other = None if other is None else other.contiguous()
    ops.typed("norm", "add_rms_norm", x.dtype)(x, residual, weight, other, *x.shape, float(eps))
    return x, residual


def rms_norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [T, H] or [T, heads, H], the last axis contiguous."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    rows = x.flatten(0, -3) if x.dim() > 2 else x.view(-1, 1, x.shape[-1])
    out = x.new_empty(x.shape)
    kernel, threads = _kernel("rms_norm", [x, weight], *rows.stride()[:2])
    count = rows.shape[0] * rows.shape[1]
    kernel((count, 1, 1), threads, x, weight, out, rows.shape[1], *rows.stride()[:2], eps)
    return out


def add_rms_norm_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    assert residual.is_contiguous() and (other is None or other.is_contiguous())
    parts = [x] if other is None else [x, other]
    kernel, threads = _kernel("add_rms_norm", [*parts, residual, weight], parts=len(parts))
    kernel((x.shape[0], 1, 1), threads, x, parts[-1], residual, weight, eps)
    return x, residual


def sum_add_rms_norm_cuda(
    terms: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert terms.is_contiguous() and residual.is_contiguous() and (other is None or other.is_contiguous())
    y = torch.empty_like(residual)
    added = [residual] if other is None else [residual, other]
    *_, last = added
    kernel, threads = _kernel("sum_add_rms_norm", [terms, weight, y, *added], parts=len(added), terms=terms.shape[1])
    kernel((terms.shape[0], 1, 1), threads, terms, last, pitch(last), residual, weight, y, eps)
    return y, residual


def norm_add_norm_cuda(
    x: Tensor, post_weight: Tensor, post_eps: float, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    assert residual.is_contiguous()
    kernel, threads = _kernel("norm_add_norm", [x, residual, post_weight, weight])
    kernel((x.shape[0], 1, 1), threads, x, residual, post_weight, weight, post_eps, eps)
    return x, residual


def _kernel(name: str, vectors: list[Tensor], *strides: int, parts: int = 1, terms: int = 1) -> tuple[jit.Kernel, int]:
    """For rows of the first one's last axis, and its threads per row. parts: that are added to the residual, of which
    the first one is the sum of so many terms."""
    x, *_ = vectors
    size = x.shape[-1]
    vector = jit.common_vector(vectors, size, *strides)
    made = sizes(size, vector, parts, terms)
    return jit.kernel("norm", name, x.dtype, **made), made["THREADS"]


def pitch(other: Tensor) -> int:
    """Elements from one row of other [T, H] to the next; of [H], which is added to all rows, 0."""
    return other.shape[-1] if other.dim() > 1 else 0


def sizes(size: int, vector: int, parts: int, terms: int) -> dict[str, int]:
    """What norm.cu is compiled for: of rows of `size`, `vector` elements at a time."""
    threads = min(max(-(-size // vector // 32) * 32, 32), 512)
    return dict(N=size, V=vector, THREADS=threads, PARTS=parts, TERMS=terms)
