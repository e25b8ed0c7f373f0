"""Products of a few rows with a weight matrix on GPUs, where all time goes into reading the matrix."""

from __future__ import annotations

from torch import Tensor

from . import jit

GEMV_ROWS = 2  # more are faster on tensor cores
MOST_ROWS = 16
MOST_OUTPUTS = 4096  # of more than GEMV_ROWS rows: wider matrices keep the library's kernels busy enough
GEMV_SHARED = 100 << 10  # bytes of shared memory for x: two blocks must fit on a multiprocessor


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether `skinny_linear` takes x [T, I] and weight [O, I], and is the faster one."""
    if not x.is_cuda or x.dim() != 2 or x.element_size() != 2 or not 0 < len(x) <= MOST_ROWS:
        return False
    if len(x) > GEMV_ROWS and weight.shape[0] > MOST_OUTPUTS:
        return False
    whole = x.shape[1] % 512 == 0 and weight.shape[0] % 64 == 0 and x.is_contiguous() and weight.is_contiguous()
    return whole and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0


def skinny_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I] times the transpose of weight [O, I] where that `suits`; accumulated in f32."""
    if len(x) <= GEMV_ROWS and x.nbytes <= GEMV_SHARED:
        return gemv(x, weight, *((1, 8) if len(x) == 1 else (2, 4)))
    return by_tensor_cores(x, weight, 1, 2 if x.shape[1] <= 4096 else 4)


def gemv(x: Tensor, weight: Tensor, outs: int, ahead: int) -> Tensor:
    """A warp computes `outs` outputs and has `ahead` accesses to each row under way."""
    rows, inputs = x.shape
    y = x.new_empty(rows, weight.shape[0])
    kernel = jit.kernel("gemv", "gemv", x.dtype, x.nbytes, I=inputs, R=rows, OUTS=outs, AHEAD=ahead)
    kernel((weight.shape[0] // (8 * outs), 1, 1), 256, x, weight, y, weight.shape[0], shared=x.nbytes)
    return y


def by_tensor_cores(x: Tensor, weight: Tensor, high: int, ahead: int) -> Tensor:
    """A block computes 16 * high outputs and each of its warps has `ahead` steps under way, an even number."""
    rows, inputs = x.shape
    y = x.new_empty(rows, weight.shape[0])
    tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    kernel = jit.kernel("skinny", "skinny", x.dtype, I=inputs, TILES=tiles, HIGH=high, AHEAD=ahead)
    kernel((weight.shape[0] // (16 * high), 1, 1), 256, x, weight, y, rows, weight.shape[0])
    return y
