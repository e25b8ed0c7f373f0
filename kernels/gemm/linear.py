"""The one place where activations meet a weight matrix of their own precision.

On CPUs, weights stay as they are where there are C++ kernels (cpu_gemm.py); without, f32 matrices are kept in oneDNN's
blocked layout. Measured on a core of an EPYC with AVX-512, another one busy (2026-11-23), the GEMMs of 12 layers of
3.1 M elements and of a head of 12 M, from memory: 1, 4, 16 and 48 rows take 10.2, 13.2, 27 and 62 ms in C++, 17.9,
14.3, 24 and 54 packed, 18.4, 28, 42 and 93 by torch as they are; in bf16 7.2, 6.5, 14 and 34 in C++, 17, 16, 30 and 36
by torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from .. import jit
from ..activation.activation import gated_activation
from ..candidate import Candidate, choose
from ..cpp import ops
from ..device import DeviceCaps
from . import cpu_gemm, cublaslt, gemv, pipelined_gemm

PACK_FROM = 1 << 16  # elements; a packed GEMM takes longer to start, which smaller matrices do not win back
ROWS_HINT = 16  # rows that the layout is chosen for; this one is the fastest, or nearly, from 1 to 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of weight [O, I], plus bias [O]: [T, O], contiguous. `weight` may be packed."""
    return gated_linear(x, weight, "", bias)


def gated_linear(x: Tensor, weight: Tensor, gate: str = "silu", bias: Tensor | None = None) -> Tensor:
    """act(x G^T) * (x U^T): [T, O], where weight [2 O, I] is G over U, and bias [2 O] is added before. gate: of
    activation.ACTIVATIONS; "": `linear`."""
    found = choose(GPU if x.is_cuda else CPU, x, weight, gate, bias)
    assert found is not None, "the last one takes all"
    return found.run(x, weight, gate, bias)


def variants(
    rows: Iterable[int], weight: Tensor, gate: str, bias: bool, caps: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """Programs to compile for GEMMs of so many rows, each, on a GPU."""
    for n in rows:
        for one in GPU:
            found = one.variant and one.variant(n, weight, gate, bias, caps)
            if found:
                yield found
                break


def pack(weight: Tensor) -> Tensor:
    """The weight as `linear` likes it best on its device: a tensor for `linear` alone, or `weight` itself."""
    cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if ops.takes(weight):
        return weight
    if not cpu or weight.dtype != torch.float32 or weight.numel() < PACK_FROM:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)


def _any(x: Tensor, weight: Tensor, gate: str, bias: Tensor | None) -> bool:
    return True


def _is_packed(x: Tensor, weight: Tensor, gate: str, bias: Tensor | None) -> bool:
    return weight.is_mkldnn


def _packed_linear(x: Tensor, weight: Tensor, gate: str, bias: Tensor | None) -> Tensor:
    if len(x):
        y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    else:
        y = x.new_empty(0, weight.shape[0])
    return gated_activation(y, gate) if gate else y


def _library_linear(x: Tensor, weight: Tensor, gate: str, bias: Tensor | None) -> Tensor:
    if x.is_cuda:
        y = cublaslt.linear(x, weight, bias)
        jit.fence(x.device)
    else:
        y = torch_linear(x, weight, bias)
    return gated_activation(y, gate) if gate else y


GPU = (
    gemv.CANDIDATE,
    pipelined_gemm.CANDIDATE,
    Candidate("cublaslt.py", "GPUs", "all else, by algorithms that autotune.py has measured", _any, _library_linear),
)
CPU = (
    Candidate("oneDNN", "CPUs without C++ kernels", "packed weights, f32", _is_packed, _packed_linear),
    cpu_gemm.CANDIDATE,
    Candidate("torch", "CPUs", "all else", _any, _library_linear),
)
