"""Layer normalisation (Ba, Kiros and Hinton 2016, arXiv 1607.06450), plain and fused with the residual add."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm

from .. import jit
from ..cpp import ops


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis; computed in f32 and rounded once. A new
    tensor.

    x: [T, H], with weight and bias [H]; or heads [T, heads, H], with weight and bias [H] or one for each head
    [heads, H]. None: no weight, no bias.
    """
    if x.is_cuda:
        return layer_norm_cuda(x, weight, bias, eps)
    if x.stride(-1) == 1 and _of_type(x, weight, bias) and ops.takes(x):
        return layer_norm_cpu(x, weight, bias, eps)
    return layer_norm_reference(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, rounded to x's dtype before it is normed, as norm.add_rms_norm does it.

    x and residual [T, H] may be overwritten. other: is added to x before, and that rounded.
    """
    if x.is_cuda:
        return add_layer_norm_cuda(x, residual, weight, bias, eps, other)
    if x.is_contiguous() and residual.is_contiguous() and _of_type(x, residual, weight, bias) and ops.takes(x):
        return add_layer_norm_cpu(x, residual, weight, bias, eps, other)
    if other is not None:
        x = x + other
    return add_layer_norm_reference(x, residual, weight, bias, eps)


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


def layer_norm_cpu(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x: [T, H] or [T, heads, H], the last axis contiguous."""
    y = x.new_empty(x.shape)
    rows = x if x.dim() == 3 else x.unsqueeze(1)
    ops.typed("layer_norm", "layer_norm", x.dtype)(
        x, weight, bias, y, *rows.shape, *rows.stride()[:2], _step(weight, bias), float(eps)
    )
    return y


def add_layer_norm_cpu(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    other = None if other is None else other.contiguous()
    ops.typed("layer_norm", "add_layer_norm", x.dtype)(x, residual, weight, bias, other, *x.shape, float(eps))
    return x, residual


def layer_norm_cuda(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x: [T, H] or [T, heads, H]."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = x.new_empty(x.shape)
    rows = x if x.dim() == 3 else x.unsqueeze(1)
    strides = rows.stride()[:2]
    kernel, threads = _kernel("layer_norm", [x], weight, bias, *strides)
    grid = rows.shape[0] * rows.shape[1], 1, 1
    kernel(grid, threads, x, _or(weight, x), _or(bias, x), out, rows.shape[1], *strides, _step(weight, bias), eps)
    return out


def add_layer_norm_cuda(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    assert residual.is_contiguous() and (other is None or other.is_contiguous())
    parts = [x] if other is None else [x, other]
    kernel, threads = _kernel("add_layer_norm", [*parts, residual], weight, bias, parts=len(parts))
    kernel((x.shape[0], 1, 1), threads, x, parts[-1], residual, _or(weight, x), _or(bias, x), eps)
    return x, residual


def _kernel(
    name: str, rows: list[Tensor], weight: Tensor | None, bias: Tensor | None, *strides: int, parts: int = 1
) -> tuple[jit.Kernel, int]:
    """For rows of the first one's last axis, and its threads per row. parts: that are added to the residual."""
    x, *_ = rows
    size = x.shape[-1]
    vector = jit.common_vector([y for y in (*rows, weight, bias) if y is not None], size, *strides)
    threads = min(max(-(-size // vector // 32) * 32, 32), 512)
    sizes = dict(N=size, V=vector, THREADS=threads, PARTS=parts, WEIGHT=int(weight is not None))
    return jit.kernel("layer_norm", name, x.dtype, **sizes, BIAS=int(bias is not None)), threads


def _of_type(x: Tensor, *others: Tensor | None) -> bool:
    return all(y is None or y.dtype == x.dtype for y in others)


def _step(weight: Tensor | None, bias: Tensor | None) -> int:
    """How far one head's weight and bias are from the next one's."""
    one = weight if weight is not None else bias
    return one.shape[-1] if one is not None and one.dim() == 2 else 0


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """An address for a kernel that does not read there."""
    return other if x is None else x
