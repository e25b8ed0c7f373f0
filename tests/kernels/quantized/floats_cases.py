"""Weights of 8 and 4 bits with scales, and what GPUs multiply with them."""

from __future__ import annotations

import torch
from phalanx.kernels.device import device_caps
from phalanx.kernels.quantized import e4m3_wgmma, floats
from phalanx.kernels.quantized.floats import Floats
from phalanx.kernels.quantized.packed_gemm import Packed
from torch import Tensor

# outputs, inputs, inputs of a scale; of pairs where it is 32 and more follow.
SIZES = [(48, 128, 128), (70, 200, 8), (33, 300, 300), (16, 1200, 4), (100, 256, 64)]


def make(outputs: int, inputs: int, unit: int, pairs: bool = False, seed: int = 0) -> Floats:
    """Random codes, all that are numbers; the same ones for the same arguments."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // 2 if pairs else inputs), dtype=torch.uint8, generator=draw)
    scales = outputs, inputs // unit
    if pairs:
        return floats.pack(codes, torch.randint(1, 140, scales, dtype=torch.uint8, generator=draw))
    codes[(codes & 0x7F) == 0x7F] = 0
    return floats.pack(codes, torch.rand(scales, generator=draw) / 448)


def rounded(x: Tensor) -> Tensor:
    """x [T, I] in e4m3 with a scale for each row, in f64."""
    most = x.float().abs().amax(1, keepdim=True)
    codes = torch.where(most > 0, x.float() * (torch.full_like(most, 448) / most), 0).to(torch.float8_e4m3fn).double()
    return codes * (most.double() / 448)


def as_multiplied(x: Tensor, packed: object) -> Tensor:
    """x [T, I] as a GPU multiplies it with these weights, in f64: rounded where tensor cores of 8 bits do it."""
    eight = isinstance(packed, Packed) and e4m3_wgmma.chosen(len(x), packed.layout, device_caps(x.device))
    return rounded(x) if eight else x.double()
