"""Blocks of ggml's types as GGUF files hold them, made of weights; IQ4_NL and IQ4_XS are encoded for files alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.quantized import ggml_encoders, int8_codes
from ...kernels.quantized.ggml_types import TABLE, TYPES, Numbers, Type

# The code of a group's largest number when scales are tried: about either end of the table.
ENDS = (*range(-135, -119), *range(105, 121))


def encode(name: str, rows: Tensor) -> Tensor:
    """rows [O, I] of any float dtype → uint8 [O, bytes]. name: a type's in files."""
    type = TYPES[name.lower()]
    if type.name == "q8_0":
        codes, scales = int8_codes.encode(rows)
        groups = codes.view(torch.uint8).unflatten(1, (-1, type.form.super))
        return type.join(Numbers(scales.unsqueeze(2), None, groups)).flatten(1)
    if type.looked_up:
        return ggml_encoders.by_groups(type, rows, looked_up)
    return ggml_encoders.encode(type, rows)


def looked_up(type: Type, groups: Tensor) -> Tensor:
    """f32 [O, super-blocks, groups, 32] → blocks [O, super-blocks, bytes]."""
    scales = scales_of(groups)
    if not type.scale_bits:
        factors = scales.to(torch.float16)
        return type.join(Numbers(factors, None, codes_of(groups, factors.float()).flatten(2)))
    factors, whole = ggml_encoders.shared_factor(scales, 1 << type.scale_bits - 1)
    codes = codes_of(groups, factors.float() * whole)
    return type.join(Numbers(factors, (whole + type.above).to(torch.uint8), codes.flatten(2)))


def scales_of(groups: Tensor) -> Tensor:
    """f32 [..., 32] → scales [...], of either sign: of those that are tried the best one by least squares."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    table = torch.tensor(TABLE, dtype=torch.float32, device=groups.device)
    found, best = torch.zeros_like(largest), torch.zeros_like(largest)
    for end in ENDS:
        values = table[codes_of(groups, largest / end).int()]
        products, squares = (values * groups).sum(-1), values.square().sum(-1)
        gain = products.square() / squares  # by which the squared error is smaller than the squares of the weights
        found, best = torch.where(gain > best, products / squares, found), torch.maximum(gain, best)
    return found


def codes_of(groups: Tensor, scales: Tensor) -> Tensor:
    """The nearest numbers' codes of f32 [..., 32] by scales [...]: uint8 [..., 32]."""
    table = torch.tensor(TABLE, dtype=torch.float32, device=groups.device)
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return torch.bucketize(groups * inverse.unsqueeze(-1), (table[1:] + table[:-1]) / 2).to(torch.uint8)
