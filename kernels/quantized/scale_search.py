"""Finds scales with which groups of weights lose least when they are rounded to codes of few bits.

Several scales around the one that spans the group are tried. For the codes that each gives, the best scale, and minimum
where the type has one, follows by least squares; the one with the smallest squared error is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import ops

STEPS = 16  # scales that are tried


def with_minima(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """groups f32 [..., 16 or 32], about code * scale - minimum with codes 0 to most → scales, minima [...], none below
    0."""
    scales, minima = groups.new_empty(2, *groups.shape[:-1])
    return (scales, minima) if _search(groups, scales, minima, most) else with_minima_reference(groups, most)


def signed(groups: Tensor, most: int) -> Tensor:
    """groups f32 [..., 16 or 32], about code * scale with codes -most to most - 1 → scales [...] of either sign."""
    scales = groups.new_empty(groups.shape[:-1])
    return scales if _search(groups, scales, None, most) else signed_reference(groups, most)


def _search(groups: Tensor, scales: Tensor, minima: Tensor | None, most: int) -> bool:
    """Search by C++ or Triton; False: neither takes these."""
    if ops.reads(groups):
        ops.op("ggml_encoders", "scale_search")(groups, scales, minima, scales.numel(), groups.shape[-1], most, STEPS)
        return True
    if groups.is_cuda and groups.numel() > 0:
        from . import scale_search_triton

        scale_search_triton.search(groups.contiguous(), scales, minima, most, STEPS)
        return True
    return False


def with_minima_reference(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    count = groups.shape[-1]
    low = groups.amin(-1).clamp(max=0)
    span = groups.amax(-1).clamp(min=0) - low
    total = groups.sum(-1)
    best_scale, best_minimum = span / most, -low
    best = torch.full_like(low, torch.inf)
    for step in range(STEPS):
        codes = codes_of(groups - low.unsqueeze(-1), span / (most - 1 + 2.0 * step / STEPS), 0, most)
        sums, squares, products = codes.sum(-1), (codes * codes).sum(-1), (codes * groups).sum(-1)
        spread = count * squares - sums * sums
        scale = torch.where(spread > 0, (count * products - sums * total) / spread.clamp(min=1), best_scale)
        minimum = (scale * sums - total) / count
        alone = products / squares.clamp(min=1)  # where the best minimum would be below 0
        scale, minimum = torch.where(minimum < 0, alone, scale), minimum.clamp(min=0)
        error = (codes * scale.unsqueeze(-1) - minimum.unsqueeze(-1) - groups).square().sum(-1)
        better = (error < best) & (scale >= 0) & (spread > 0)
        best = torch.where(better, error, best)
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def signed_reference(groups: Tensor, most: int) -> Tensor:
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    found, best = largest / -most, torch.full_like(largest, torch.inf)
    for step in range(STEPS):
        codes = codes_of(groups, largest / -(most - 1 + 2.0 * step / STEPS), -most, most - 1)
        squares = codes.square().sum(-1)
        scale = (codes * groups).sum(-1) / squares.clamp(min=1)
        error = (codes * scale.unsqueeze(-1) - groups).square().sum(-1)
        better = (error < best) & (squares > 0)
        best, found = torch.where(better, error, best), torch.where(better, scale, found)
    return found


def codes_of(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """groups [..., n] by scales [...], rounded to low to high; zeros where a scale is 0."""
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return (groups * inverse.unsqueeze(-1)).round_().clamp_(low, high)
