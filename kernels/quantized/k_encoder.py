"""What encoders of the K types share: scales of groups become whole numbers by the f16 factor of their super-block."""

from __future__ import annotations

import torch
from torch import Tensor

from . import scale_search


def with_minima(groups: Tensor, most: int, numbers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """groups f32 [..., G, n] of super-blocks; codes are 0 to most, scales and minima 0 to numbers.

    Returns factors f16 [..., 2], and uint8: scales and minima [..., G], codes [..., G, n].
    """
    scales, minima = scale_search.with_minima(groups, most)
    factors = torch.stack((scales.amax(-1), minima.amax(-1)), -1) / numbers
    factors = factors.clamp(max=65504).to(torch.float16)
    whole = [scale_search.codes_of(one, factors[..., i].float(), 0, numbers) for i, one in enumerate((scales, minima))]
    by, less = (factors[..., i, None].float() * one for i, one in enumerate(whole))
    codes = scale_search.codes_of(groups + less.unsqueeze(-1), by, 0, most)
    return factors, whole[0].to(torch.uint8), whole[1].to(torch.uint8), codes.to(torch.uint8)


def signed(groups: Tensor, most: int, numbers: int) -> tuple[Tensor, Tensor, Tensor]:
    """groups f32 [..., G, n] of super-blocks; codes are -most to most - 1, scales -numbers to numbers - 1.

    Returns factors f16 [..., 1], scales int8 [..., G], and codes uint8 [..., G, n], more by `most`.
    """
    scales = scale_search.signed(groups, most)
    largest = scales.gather(-1, scales.abs().argmax(-1, keepdim=True))
    factors = (largest / -numbers).clamp(-65504, 65504).to(torch.float16)
    whole = scale_search.codes_of(scales, factors.float().squeeze(-1), -numbers, numbers - 1)
    codes = scale_search.codes_of(groups, factors.float() * whole, -most, most - 1) + most
    return factors, whole.to(torch.int8), codes.to(torch.uint8)
