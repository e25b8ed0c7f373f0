"""x in e4m3, with a scale for each row: what tensor cores of 8 bits multiply (e4m3_wgmma.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..norm import norm

E4M3_MAX = 448.0  # the largest number of e4m3
SMALLEST = 1e-35  # as in e4m3_scale.cuh
MAX_THREADS = 512  # of a block of e4m3_encode.cuh
NORM_VECTOR = 8  # elements that e4m3_norm.cu takes at once


class E4m3Rows(NamedTuple):
    """x [T, I] as e4m3_wgmma.cu takes it."""

    codes: Tensor  # uint8 [T, I], in the order of `encode_reference`
    scales: Tensor  # f32 [T]
    dtype: torch.dtype  # of x, and of what is made of it


def encode(x: Tensor) -> E4m3Rows:
    """x [T, I], rounded to e4m3."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), device=x.device)
    of = sizes(x.shape[1])
    kernel = jit.kernel("e4m3_rows", "e4m3_rows", x.dtype, 0, **of)
    kernel((len(x), 1, 1), of["THREADS"], x, codes, scales)
    return E4m3Rows(codes, scales, x.dtype)


def sum_add_rms_norm(
    terms: Tensor, residual: Tensor, weight: Tensor, eps: float, other: Tensor | None = None
) -> tuple[E4m3Rows, Tensor]:
    """The result of `encode` on norm.sum_add_rms_norm, bit for bit, and the residual [T, H].

    All are of 16 bits and begin at multiples of 16 bytes; H is a multiple of 16. For sm_90 and later.
    """
    (rows, size), added = residual.shape, [residual] if other is None else [residual, other]
    *_, last = added
    assert jit.plain(terms, weight, *added) and size % (2 * NORM_VECTOR) == 0
    codes = torch.empty(rows, size, dtype=torch.uint8, device=residual.device)
    scales = torch.empty(rows, device=residual.device)
    of = norm.sizes(size, NORM_VECTOR, len(added), terms.shape[1])
    kernel = jit.kernel("e4m3_norm", "sum_add_rms_norm_e4m3", residual.dtype, **of)
    kernel((rows, 1, 1), of["THREADS"], terms, last, norm.pitch(last), residual, weight, codes, scales, eps)
    return E4m3Rows(codes, scales, residual.dtype), residual


def sizes(inputs: int) -> dict[str, int]:
    """Compile-time constants of e4m3_encode.cuh: a thread has two runs of 16 inputs, or more of long rows."""
    return dict(I=inputs, THREADS=min(-(-inputs // 1024) * 32, MAX_THREADS))


def encode_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, I], in the order of packed tiles, and scales f32 [T]: max|x| / 448. Rows of nothing above
    SMALLEST are zeros."""
    most = x.float().abs().amax(1, keepdim=True)
    by = torch.full_like(most, E4M3_MAX) / most  # a number over a tensor would be rounded twice
    values = torch.where(most > SMALLEST, x.float() * by, 0).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    # Axes of 16 inputs: a byte's first bit, a lane's t, the second bit.
    codes = values.view(torch.uint8).reshape(len(x), x.shape[1] // 16, 2, 4, 2)
    return codes.permute(0, 1, 3, 4, 2).reshape(x.shape), (most / E4M3_MAX).squeeze(1)
