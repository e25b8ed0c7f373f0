"""The one place where activations meet a weight matrix of their own precision.

On CPUs, weights stay as they are where there are C++ kernels (cpu_gemm.py); without, f32 matrices are kept in oneDNN's
blocked layout. Measured on a core of an EPYC with AVX-512, another one busy (2026-11-23), the GEMMs of 12 layers of
3.1 M elements and of a head of 12 M, from memory: 1, 4, 16 and 48 rows take 10.2, 13.2, 27 and 62 ms in C++, 17.9,
14.3, 24 and 54 packed, 18.4, 28, 42 and 93 by torch as they are; in bf16 7.2, 6.5, 14 and 34 in C++, 17, 16, 30 and 36
by torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from ..activation.activation import gated_activation
from ..cpp import ops
from . import cpu_gemm, cublaslt, skinny, swiglu_gemm

PACK_FROM = 1 << 16  # elements; a packed GEMM takes longer to start, which smaller matrices do not win back
ADD_FROM = 1024  # rows of a GEMM that adds itself to the residual stream
ROWS_HINT = 16  # rows that the layout is chosen for; this one is the fastest, or nearly, from 1 to 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of weight [O, I], plus bias [O]: [T, O], contiguous. `weight` may be packed."""
    if x.is_cuda:
        if skinny.supports(x, weight, bias):
            return skinny.skinny_linear(x, weight, bias=bias)
        return cublaslt.linear(x, weight, bias)
    if weight.is_mkldnn:
        return _packed_linear(x, weight, bias)
    if cpu_gemm.supports(x, weight):
        return cpu_gemm.cpu_linear(x, weight, bias)
    return torch_linear(x, weight, bias)


def accumulates(x: Tensor, weight: Tensor, stream: Tensor) -> bool:
    """Whether the GEMM of x [T, I] and weight [O, I] adds itself to stream [T, O] faster than the norm that follows.

    Of 8192 rows on an H200 with the norm (2026-11-22), 4096 and 14336 inputs: 449 and 1439 us instead of 466 and 1453;
    of 512 rows 51 and 97 instead of 37 and 99.
    """
    same = x.dtype == weight.dtype == stream.dtype and x.element_size() == 2
    return x.is_cuda and x.shape[0] >= ADD_FROM and same and stream.is_contiguous()


def gated_linear(x: Tensor, weight: Tensor, activation: str = "silu", bias: Tensor | None = None) -> Tensor:
    """act(x G^T) * (x U^T): [T, O], where weight [2 O, I] is G over U, and bias [2 O] is added before; the activations
    are activation.ACTIVATIONS."""
    if not weight.is_mkldnn and skinny.supports(x, weight, bias):
        return skinny.skinny_linear(x, weight, activation, bias)
    if swiglu_gemm.supports(x, weight, bias):
        return swiglu_gemm.swiglu_gemm(x, weight, activation, bias)
    return gated_activation(linear(x, weight, bias), activation)


def pack(weight: Tensor) -> Tensor:
    """The weight as `linear` likes it best on its device: a tensor for `linear` alone, or `weight` itself."""
    cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if ops.takes(weight):
        return weight
    if not cpu or weight.dtype != torch.float32 or weight.numel() < PACK_FROM:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
