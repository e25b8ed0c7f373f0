"""The one place where activations meet a weight matrix in full precision.

On CPUs, f32 matrices are kept in oneDNN's blocked layout in place of the plain one, unless steps of few rows are
compiled (cpu.py). Measured with a rank on each of two cores with AVX-512 (2026-11-21), the products of 12 layers of
3.1 M elements and of a head of 12 M, from memory: 1, 4, 16 and 48 rows take 14.4, 16.6, 24 and 41 ms packed, 13.4, 27,
32 and 51 plain, and 14.5, 19, 33 and 65 compiled. Beside the other operations of a step a lone row's compiled ones took
13.7 ms, packed ones 15 to 18: their code has to come from memory as well. Since then compiled ones of up to three rows
ask for the rows of the weights that come next, and read a sixth faster (compiler.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from . import gated, library, skinny
from .activation import silu_mul
from .cpu import one_core

PACK_FROM = 1 << 16  # elements; a packed product costs 10 us more to start, which smaller matrices do not win back
ADD_FROM = 1024  # rows of a product that adds itself to the residual stream
ROWS_HINT = 16  # rows that the layout is chosen for; this one is the fastest, or nearly, from 1 to 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of weight [O, I], plus bias [O]: [T, O], contiguous. `weight` may be packed."""
    if weight.is_mkldnn:
        return _packed_linear(x, weight, bias)
    if bias is None and skinny.suits(x, weight):
        return skinny.skinny_linear(x, weight)
    if (compiled := one_core(x)) and weight.dtype == torch.float32:
        y = x.new_empty(len(x), len(weight))
        compiled.linear(x.contiguous().numpy(), weight.numpy(), y.numpy())
        return y if bias is None else y.add_(bias)
    if bias is None and x.is_cuda:
        return library.linear(x, weight)
    return torch_linear(x, weight, bias)


def adds(x: Tensor, weight: Tensor, stream: Tensor) -> bool:
    """Whether the product of x [T, I] and weight [O, I] adds itself to stream [T, O] faster than the norm that follows.

    Of 8192 rows on an H200 with the norm (2026-11-22), 4096 and 14336 inputs: 449 and 1439 us instead of 466 and 1453;
    of 512 rows 51 and 97 instead of 37 and 99.
    """
    same = x.dtype == weight.dtype == stream.dtype and x.element_size() == 2
    return x.is_cuda and len(x) >= ADD_FROM and same and stream.is_contiguous()


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(x G^T) * (x U^T): [T, O], where weight [2 O, I] is G over U and a bias [2 O] is added to the products."""
    if bias is None and not weight.is_mkldnn and skinny.suits(x, weight):
        return skinny.skinny_linear(x, weight, gated=True)
    if bias is None and gated.suits(x, weight):
        return gated.gated_product(x, weight)
    return silu_mul(linear(x, weight, bias))


def pack(weight: Tensor) -> Tensor:
    """The weight as `linear` likes it best on its device: a tensor for `linear` alone, or `weight` itself."""
    cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if one_core(weight, len(weight)):
        return weight
    if not cpu or weight.dtype != torch.float32 or weight.numel() < PACK_FROM:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
