"""Rounding of weights to ggml's types: codes of 4 and 5 bits as gguf-py does, bit for bit, the K types by scales that
are searched (scale_search.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..cpp import ops
from . import scale_search
from .ggml_types import Numbers, Type

CHUNK = 1 << 23  # elements that are encoded at once on GPUs: what that takes is small beside a matrix
CPU_CHUNK = 1 << 18  # and by torch on CPUs: they stay in a cache
F16_MAX = 65504.0


def encode(type: Type, weight: Tensor) -> Tensor:
    """weight [O, I] of any float dtype → ggml's blocks uint8 [O, I / super * bytes]."""
    if not ops.reads(weight):
        return by_groups(type, weight, encode_groups)
    blocks = weight.new_empty(len(weight), weight.shape[1] // type.form.super * type.bytes, dtype=torch.uint8)
    encoder = ops.typed("ggml_encoders", f"encode_{type.name}", weight.dtype)
    encoder(weight, blocks, weight.numel() // type.form.super, scale_search.STEPS)
    return blocks


def by_groups(type: Type, weight: Tensor, encode: Callable[[Type, Tensor], Tensor]) -> Tensor:
    """`encode` in torch, of some outputs at a time. encode: f32 [O, super-blocks, groups, group] → uint8
    [O, super-blocks, bytes]."""
    (outputs, inputs), form = weight.shape, type.form
    shape = inputs // form.super, form.super // form.group, form.group
    blocks = weight.new_empty(outputs, shape[0] * type.bytes, dtype=torch.uint8)
    rows = max(1, (CHUNK if weight.is_cuda else CPU_CHUNK) // max(inputs, 1))
    for first in range(0, outputs, rows):
        part = weight[first : first + rows].float()
        blocks[first : first + rows] = encode(type, part.reshape(len(part), *shape)).flatten(1)
    return blocks


def encode_groups(type: Type, groups: Tensor) -> Tensor:
    """f32 [O, super-blocks, groups, group] → blocks [O, super-blocks, bytes], as C++ makes them."""
    codes_of, span = 1 << type.code_bits, 1 << type.scale_bits
    numbers = None
    if not type.scale_bits:
        groups = groups.squeeze(2)
        factors, codes = spanned(groups, codes_of - 1) if type.form.minima else centred(groups, codes_of // 2)
    elif type.form.minima:
        factors, numbers, codes = with_minima(groups, codes_of - 1, span - 1)
    else:
        factors, numbers, codes = signed(groups, codes_of // 2, span // 2)
        numbers = (numbers + type.above).view(torch.uint8)
    return type.join(Numbers(factors, numbers, codes.flatten(2)))


def centred(groups: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """f32 [..., n] → scales f16 [..., 1], with which the largest becomes -middle, and codes uint8 more by `middle`.

    Rounded as gguf-py does, which is to the nearest in f32, halves up.
    """
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = largest / torch.full((), -float(middle), device=groups.device)  # no multiplication by the reciprocal
    inverse = torch.where(scales == 0, 0, 1 / scales)
    codes = ((groups * inverse) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1)
    return scales.to(torch.float16), codes.to(torch.uint8)


def spanned(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """f32 [..., n] → f16 [..., 2], scales and smallest, and codes uint8 from 0 to most; rounded as gguf-py does."""
    low = groups.amin(-1, keepdim=True)
    scales = (groups.amax(-1, keepdim=True) - low) / torch.full((), float(most), device=groups.device)
    inverse = torch.where(scales == 0, 0, 1 / scales)
    codes = ((groups - low) * inverse + 0.5).trunc().clamp(0, most)
    return torch.cat((scales, low), -1).to(torch.float16), codes.to(torch.uint8)


def with_minima(groups: Tensor, most: int, numbers: int) -> tuple[Tensor, Tensor, Tensor]:
    """groups f32 [..., G, n] of super-blocks; codes are 0 to most, scales and minima 0 to numbers.

    Returns factors f16 [..., 2], and uint8: scales, then minima [..., 2 G], and codes [..., G, n].
    """
    scales, minima = scale_search.with_minima(groups, most)
    factors = torch.stack((scales.amax(-1), minima.amax(-1)), -1) / numbers
    factors = factors.clamp(max=F16_MAX).to(torch.float16)
    whole = [scale_search.codes_of(one, factors[..., i].float(), 0, numbers) for i, one in enumerate((scales, minima))]
    by, less = (factors[..., i, None].float() * one for i, one in enumerate(whole))
    codes = scale_search.codes_of(groups + less.unsqueeze(-1), by, 0, most)
    return factors, torch.cat(whole, -1).to(torch.uint8), codes.to(torch.uint8)


def signed(groups: Tensor, most: int, numbers: int) -> tuple[Tensor, Tensor, Tensor]:
    """groups f32 [..., G, n] of super-blocks; codes are -most to most - 1, scales -numbers to numbers - 1.

    Returns factors f16 [..., 1], scales int8 [..., G], and codes uint8 [..., G, n], more by `most`.
    """
    factors, whole = shared_factor(scale_search.signed(groups, most), numbers)
    codes = scale_search.codes_of(groups, factors.float() * whole, -most, most - 1) + most
    return factors, whole.to(torch.int8), codes.to(torch.uint8)


def shared_factor(scales: Tensor, numbers: int) -> tuple[Tensor, Tensor]:
    """Scales [..., G] of groups → the f16 factor of their super-block [..., 1], with which the largest becomes
    -numbers, and whole numbers f32 [..., G]."""
    largest = scales.gather(-1, scales.abs().argmax(-1, keepdim=True))
    factors = (largest / -numbers).clamp(-F16_MAX, F16_MAX).to(torch.float16)
    return factors, scale_search.codes_of(scales, factors.float().squeeze(-1), -numbers, numbers - 1)
