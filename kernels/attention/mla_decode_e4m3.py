"""The kernel mla_decode_e4m3.cu, for mla_decode.py: latents cached in e4m3, which TMA brings."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import jit
from ..device import device_caps
from .mla_parts import PANEL, ROWS, SPLIT, THREADS

# Bytes of a block: of two tiles of 64 tokens, rows of five boxes of 128 and two scales; of scores, softmax weights, and
# what it keeps of each head; and for a start at a multiple of 1024.
SHARED = 2 * 64 * (5 * 128 + 2) + 5 * ROWS * (64 + 8) * 4 + ROWS * (64 * 2 + 16) + 3 * ROWS * 4 + 1024


def supports(device: torch.device) -> bool:
    """Whether this kernel, and not mla_decode.cu, reads caches in e4m3."""
    return device.type != "cuda" or device_caps(device).has_tma


def mla_decode_e4m3(
    grid: tuple[int, int, int], q: Tensor, cache: Tensor, scales: Tensor, *rest: Tensor | float
) -> None:
    """As mla_decode.decode, whose arguments these are. rest: what mla_decode.cu takes behind its scales."""
    heads, (blocks, size, width) = q.shape[1], cache.shape
    kernel = jit.kernel("mla_decode_e4m3", "mla_decode_e4m3", q.dtype, SHARED, **sizes(heads, size))
    codes = jit.tensor_map(cache.data_ptr(), blocks * size, width // 2, PANEL, width // 2)
    kernel(grid, THREADS, q, codes, scales, *rest, shared=SHARED)


def sizes(heads: int, block_size: int) -> dict[str, int]:
    """What it is compiled for."""
    return dict(HEADS=heads, SIZE=block_size, SPLIT=SPLIT, ROOM=SHARED, FP8=1)
