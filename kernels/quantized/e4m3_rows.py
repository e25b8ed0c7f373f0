"""x in e4m3, with a scale for each row: what tensor cores of 8 bits multiply (e4m3_wgmma.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit

MOST = 448.0  # the largest number of e4m3
SMALLEST = 1e-35  # as in e4m3_scale.cuh
MOST_THREADS = 512  # of a block of e4m3_encode.cuh


class E4m3Rows(NamedTuple):
    """x [T, I] as e4m3_wgmma.cu takes it."""

    codes: Tensor  # uint8 [T, I], in the order of `encode_reference`
    scales: Tensor  # f32 [T]
    dtype: torch.dtype  # of x, and of what is made of it


def encode(x: Tensor) -> E4m3Rows:
    """x [T, I], rounded to e4m3. e4m3_norm.cu makes the same of a norm."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), device=x.device)
    of = sizes(x.shape[1])
    kernel = jit.kernel("e4m3_rows", "e4m3_rows", x.dtype, 0, **of)
    kernel((len(x), 1, 1), of["THREADS"], x, codes, scales)
    return E4m3Rows(codes, scales, x.dtype)


def sizes(inputs: int) -> dict[str, int]:
    """What e4m3_encode.cuh is compiled for: a thread has two runs of 16 inputs, or more of long rows."""
    return dict(I=inputs, THREADS=min(-(-inputs // 1024) * 32, MOST_THREADS))


def encode_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, I], in the order of pieces, and scales f32 [T]: max|x| / 448. Rows of nothing above SMALLEST are
    zeros."""
    most = x.float().abs().amax(1, keepdim=True)
    by = torch.full_like(most, MOST) / most  # a number over a tensor would be rounded twice
    values = torch.where(most > SMALLEST, x.float() * by, 0).clamp(-MOST, MOST).to(torch.float8_e4m3fn)
    # Of 16 inputs: a byte's first bit, a lane's t, the second bit.
    codes = values.view(torch.uint8).reshape(len(x), x.shape[1] // 16, 2, 4, 2)
    return codes.permute(0, 1, 3, 4, 2).reshape(x.shape), (most / MOST).squeeze(1)
