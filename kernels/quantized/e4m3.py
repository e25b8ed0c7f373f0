"""e4m3 that weights are quantised to while they are loaded: each output has a scale for every 512 inputs.

Hopper's tensor cores add up to so many before sums are scaled (e4m3_wgmma.cu). Not for blocks of 128 x 128 as
checkpoints have it: which outputs share a block would depend on how tensor parallelism cuts them. Nor for a whole row,
which it cuts, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import ops
from . import cuda_layouts, e4m3_cpu, floats
from .e4m3_rows import E4M3_MAX

GROUP = cuda_layouts.E4M3.inputs
UNITS = 512, 256, 128, 64, GROUP  # inputs of a scale: the first of which a rank has whole ones
CHUNK = 1 << 22  # elements that are encoded at once: what that takes is small beside a matrix


def unit_of(inputs: int) -> int:
    return next(unit for unit in UNITS if inputs % unit == 0)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] of any float dtype → codes uint8 [O, I] and scales f32 [O, I / unit]: max|w| / 448."""
    outputs, inputs = weight.shape
    unit = unit_of(inputs)
    codes = weight.new_empty(outputs, inputs, dtype=torch.uint8)
    scales = weight.new_empty(outputs, inputs // unit, dtype=torch.float32)
    rows = max(1, CHUNK // max(inputs, 1))
    for first in range(0, outputs, rows):
        part = slice(first, first + rows)
        if ops.reads(weight):
            codes[part], scales[part] = e4m3_cpu.encode(weight[part], unit)
        else:
            codes[part], scales[part] = encode_reference(weight[part], unit)
    return codes, scales


def encode_reference(weight: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, unit))
    # Divided by a tensor: by a Python number, GPUs multiply with the reciprocal, which rounds differently.
    scales = groups.abs().amax(2) / torch.full((), E4M3_MAX, device=weight.device)
    by = torch.where(scales == 0, 1, scales).unsqueeze(2)
    codes = (groups / by).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(1), scales


def kept_bits(inputs: int, device: torch.device) -> float:
    """Bits that `pack` keeps of a weight with its share of the scale."""
    return floats.kept_bits(inputs, unit_of(inputs), device)


def pack(codes: Tensor, scales: Tensor) -> floats.Packed:
    """The form that GEMMs like best on their device."""
    return floats.pack_for_device(floats.pack(codes, scales))


FORMS = (pack, floats.pack)  # of a stack's weights: CPUs do not take those with NaN as others
