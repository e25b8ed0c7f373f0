"""Forbids tokens that a grammar does not allow."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import jit

THREADS, COLUMNS = 256, 8


def mask_tokens(x: Tensor, at: Tensor, bits: Tensor, offset: int = 0) -> None:
    """Make x[at[r], c] -inf where bit `offset` + c of bits[r] is 0, in place.

    x: [S, width], the elements of a row side by side. at: [R] int32. bits: [R, words] int32, the lowest bit first.
    Columns for which there is no bit stay as they are.
    """
    if not len(at) or not x.shape[1]:
        return
    if x.is_cuda:
        mask_tokens_cuda(x, at, bits, offset)
    else:
        mask_tokens_reference(x, at, bits, offset)


def mask_tokens_reference(x: Tensor, at: Tensor, bits: Tensor, offset: int) -> None:
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
    octets = bits.contiguous().view(torch.uint8)
    allowed = ((octets[:, :, None] >> shifts) & 1).flatten(1)[:, offset : offset + x.shape[1]].bool()
    for row, kept in zip(at.tolist(), allowed, strict=True):
        x[row, : len(kept)].masked_fill_(~kept, float("-inf"))


def mask_tokens_cuda(x: Tensor, at: Tensor, bits: Tensor, offset: int) -> None:
    width = x.shape[1]
    kernel = jit.kernel("token_mask", "token_mask", x.dtype, COLUMNS=COLUMNS)
    grid = (-(-width // (THREADS * COLUMNS)), len(at), 1)
    kernel(grid, THREADS, x, x.stride(0), width, at, bits, bits.shape[1], offset)
