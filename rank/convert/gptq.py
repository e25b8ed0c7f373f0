"""GPTQ: rounds a matrix column by column, so that later columns make up for what earlier ones lose.

Frantar et al. 2022, arXiv 2210.17323. The error that counts is that of the outputs over the calibration text, which the
Hessian of the inputs tells: X^T X, of the inputs X [tokens, I] that the linear got.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # columns that are rounded before those behind them are changed
DAMPING = 0.01  # of the Hessian's mean diagonal, added to it; ten times that where it cannot be inverted
TRIES = 4
SHRINKS = 1.0, 0.95, 0.9, 0.85, 0.8, 0.75  # ranges of a group's codes that are tried, as shares of its largest weight
LEAST = 2.0**-14  # of scales: f16's least normal number


@dataclass(frozen=True)
class Scheme:
    """How weights are rounded."""

    bits: int  # of a code
    group: int  # neighbouring inputs that share a scale; 0: all of a row
    symmetric: bool  # zero points lie in the middle
    ordered: bool = False  # columns of large inputs first, so that groups are of any inputs (desc_act)

    @property
    def most(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def group_of(self, inputs: int) -> int:
        return self.group or inputs


class Rounded(NamedTuple):
    """A matrix [O, I]: (code - zero) * scale of the input's group."""

    codes: Tensor  # uint8 [O, I]
    scales: Tensor  # f32 [O, groups], exact in f16
    zeros: Tensor  # uint8 [O, groups]
    groups: Tensor  # int32 [I]: which group each input is of

    def weight(self) -> Tensor:
        """f32 [O, I]."""
        at = self.groups.long()
        return (self.codes.float() - self.zeros.float()[:, at]) * self.scales[:, at]


def quantize(weight: Tensor, hessian: Tensor, scheme: Scheme) -> Rounded:
    """weight [O, I] of any float dtype. hessian f32 [I, I] is not changed. Raises ValueError where the calibration text
    gives a Hessian that cannot be inverted."""
    outputs, inputs = weight.shape
    group = scheme.group_of(inputs)
    order = hessian.diag().argsort(descending=True) if scheme.ordered else torch.arange(inputs, device=weight.device)
    left = weight.float()[:, order]  # what is still to be rounded
    inverse = _inverse_root(hessian[order][:, order], left)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, inputs // group, device=weight.device)
    zeros = torch.empty_like(scales)
    for first in range(0, inputs, BLOCK):
        last = min(first + BLOCK, inputs)
        lost = torch.empty(outputs, last - first, device=weight.device)
        for at in range(first, last):
            number = at // group
            if at % group == 0:
                scales[:, number], zeros[:, number] = _grid(left[:, at : at + group], scheme)
            scale, zero, column = scales[:, number], zeros[:, number], left[:, at]
            code = (column / scale + zero).round().clamp(0, scheme.most)
            codes[:, at] = code.to(torch.uint8)
            lost[:, at - first] = error = (column - (code - zero) * scale) / inverse[at, at]
            # A group may reach behind this block: its grid then comes from weights of which this block's error is not
            # taken yet, as in the paper's own code.
            left[:, at:last] -= error.unsqueeze(1) * inverse[at, at:last]
        left[:, last:] -= lost @ inverse[first:last, last:]
    back = order.argsort()
    groups = (torch.arange(inputs, device=weight.device) // group)[back].to(torch.int32)
    return Rounded(codes[:, back], scales, zeros.to(torch.uint8), groups)


def relative_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """The outputs' relative error over the calibration text: |X (W - W')^T| / |X W^T|."""
    weight = weight.float()
    lost = weight - rounded
    whole = ((weight @ hessian) * weight).sum()
    return float((((lost @ hessian) * lost).sum().clamp(min=0) / whole.clamp(min=1e-30)).sqrt())


def _inverse_root(hessian: Tensor, weight: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse. Columns of inputs that are always 0 become 0."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    weight[:, dead] = 0
    damping = DAMPING * float(diagonal.mean())
    for _ in range(TRIES):
        diagonal += damping
        factor, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            root, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed:
                return root
        damping *= 10
    raise ValueError("its inputs over the calibration text are infinite, or too alike to invert their Hessian")


def _grid(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Scale and zero point [O] of a group [O, G]: of several ranges the one that rounds it best."""
    low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
    if scheme.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    best, found = torch.full_like(high, float("inf")), (high, low)
    for shrink in SHRINKS:
        scale = ((high - low) * shrink / scheme.most).to(torch.float16).float().clamp(min=LEAST)
        middle = torch.full_like(scale, (scheme.most + 1) / 2)
        zero = middle if scheme.symmetric else (-low * shrink / scale).round().clamp(0, scheme.most)
        codes = (weight / scale.unsqueeze(1) + zero.unsqueeze(1)).round().clamp(0, scheme.most)
        error = ((codes - zero.unsqueeze(1)) * scale.unsqueeze(1) - weight).square().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        found = torch.where(better, scale, found[0]), torch.where(better, zero, found[1])
    return found
