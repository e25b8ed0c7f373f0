"""Norms of rows, plain and fused with the residual add.

RMS norm: Zhang and Sennrich 2019, arXiv 1910.07467. Layer norm: Ba, Kiros and Hinton 2016, arXiv 1607.06450.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import layer_norm as torch_layer_norm

from .. import jit
from ..cpp import ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, which is `weight`'s; computed in f32 and rounded once. A new tensor."""
    if x.is_cuda:
        return _norm_cuda("rms_norm", x, (weight,), (), eps)
    if x.dim() == 2 and x.stride(1) == 1 and x.dtype == weight.dtype and ops.takes(x):
        y = x.new_empty(x.shape)
        ops.typed("norm", "rms_norm", x.dtype)(x, weight, y, *x.shape, x.stride(0), float(eps))
        return y
    return rms_norm_reference(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis; computed in f32 and rounded once. A new
    tensor.

    x: [T, H], with weight and bias [H]; or heads [T, heads, H], with weight and bias [H] or one for each head
    [heads, H]. None: no weight, no bias.
    """
    one = weight if weight is not None else bias
    step = one.shape[-1] if one is not None and one.dim() == 2 else 0  # from one head's weight to the next one's
    if x.is_cuda:
        return _norm_cuda("layer_norm", x, (weight, bias), (step,), eps)
    if x.stride(-1) == 1 and _same_dtype(x, weight, bias) and ops.takes(x):
        y, rows = x.new_empty(x.shape), x if x.dim() == 3 else x.unsqueeze(1)
        sizes = *rows.shape, *rows.stride()[:2], step, float(eps)
        ops.typed("norm", "layer_norm", x.dtype)(x, weight, bias, y, *sizes)
        return y
    return layer_norm_reference(x, weight, bias, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum. x and residual [T, H] may be overwritten.

    What is normalised is the sum rounded to x's dtype: a pipeline stage that gets the rounded sum from its
    predecessor computes the same as a model that was not cut there. other: is added to x before, and that rounded.
    """
    if (made := _add_norm("add_rms_norm", x, residual, (weight,), eps, other)) is not None:
        return made
    return add_rms_norm_reference(x if other is None else x + other, residual, weight, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A layer norm in place of `add_rms_norm`'s."""
    if (made := _add_norm("add_layer_norm", x, residual, (weight, bias), eps, other)) is not None:
        return made
    return add_layer_norm_reference(x if other is None else x + other, residual, weight, bias, eps)


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


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = torch_layer_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = residual.add_(x)
    return layer_norm_reference(total, weight, bias, eps), total


Affine = tuple[Tensor | None, ...]  # a weight, and a layer norm's bias


def _norm_cuda(name: str, x: Tensor, affine: Affine, step: tuple[int, ...], eps: float) -> Tensor:
    """x: [..., heads, H] or [T, H]."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    rows = x.flatten(0, -3) if x.dim() > 2 else x.unsqueeze(1)
    out = x.new_empty(x.shape)
    kernel, threads = _kernel(name, [x], affine, *rows.stride()[:2])
    given = (x if one is None else one for one in affine)
    sizes = rows.shape[1], *rows.stride()[:2], *step
    kernel((rows.shape[0] * rows.shape[1], 1, 1), threads, x, *given, out, *sizes, eps)
    return out


def _add_norm(
    name: str, x: Tensor, residual: Tensor, affine: Affine, eps: float, other: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """None: no kernel takes these."""
    if x.is_cuda:
        x = x.contiguous()
        assert residual.is_contiguous() and (other is None or other.is_contiguous())
        parts = [x] if other is None else [x, other]
        kernel, threads = _kernel(name, [*parts, residual], affine, parts=len(parts))
        given = (x if one is None else one for one in affine)
        kernel((x.shape[0], 1, 1), threads, x, parts[-1], residual, *given, eps)
        return x, residual
    if not (x.is_contiguous() and residual.is_contiguous() and _same_dtype(x, residual, *affine) and ops.takes(x)):
        return None
    other = None if other is None else other.contiguous()
    weight, bias = (*affine, None)[:2]
    ops.typed("norm", name, x.dtype)(x, residual, weight, bias, other, *x.shape, float(eps))
    return x, residual


def sum_add_rms_norm_cuda(
    terms: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert terms.is_contiguous() and residual.is_contiguous() and (other is None or other.is_contiguous())
    y = torch.empty_like(residual)
    added = [residual] if other is None else [residual, other]
    *_, last = added
    parts, count = len(added), terms.shape[1]
    kernel, threads = _kernel("sum_add_rms_norm", [terms, y, *added], (weight,), parts=parts, terms=count)
    kernel((terms.shape[0], 1, 1), threads, terms, last, pitch(last), residual, weight, y, eps)
    return y, residual


def norm_add_norm_cuda(
    x: Tensor, post_weight: Tensor, post_eps: float, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    assert residual.is_contiguous()
    kernel, threads = _kernel("norm_add_norm", [x, residual, post_weight], (weight,))
    kernel((x.shape[0], 1, 1), threads, x, residual, post_weight, weight, post_eps, eps)
    return x, residual


def _kernel(
    name: str, rows: list[Tensor], affine: Affine, *strides: int, parts: int = 1, terms: int = 1
) -> tuple[jit.Kernel, int]:
    """For rows of the first one's last axis, and its threads per row. parts: that are added to the residual, of which
    the first one is the sum of so many terms."""
    (x, *_), given = rows, [one is not None for one in affine]
    size = x.shape[-1]
    vectors = [*rows, *(one for one in affine if one is not None)]
    made = sizes(size, jit.common_vector(vectors, size, *strides), parts, terms)
    if len(affine) == 1:
        return jit.kernel("norm", name, x.dtype, **made), made["THREADS"]
    del made["TERMS"]
    return jit.kernel("layer_norm", name, x.dtype, **made, WEIGHT=int(given[0]), BIAS=int(given[1])), made["THREADS"]


def _same_dtype(x: Tensor, *others: Tensor | None) -> bool:
    return all(y is None or y.dtype == x.dtype for y in others)


def pitch(other: Tensor) -> int:
    """Elements from one row of other [T, H] to the next; of [H], which is added to all rows, 0."""
    return other.shape[-1] if other.dim() > 1 else 0


def sizes(size: int, vector: int, parts: int, terms: int) -> dict[str, int]:
    """Compile-time constants of norm.cu: rows of `size`, `vector` elements at a time."""
    threads = min(max(-(-size // vector // 32) * 32, 32), 512)
    return dict(N=size, V=vector, THREADS=threads, PARTS=parts, TERMS=terms)
