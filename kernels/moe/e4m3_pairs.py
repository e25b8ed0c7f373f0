"""Rows of pairs in e4m3, expert by expert, as e4m3_rows.py makes them of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..quantized import e4m3_rows
from .group import Groups


class E4m3Pairs(NamedTuple):
    """Rows as e4m3_experts.cu takes them, in the order of the groups; what is of pairs that are in no group is
    undefined."""

    codes: Tensor  # uint8 [P, I], or more rows
    scales: Tensor  # [P] f32
    weights: Tensor  # [P] f32, of the pairs


def sizes(experts: int, inputs: int, top: int) -> dict[str, jit.Size]:
    """What e4m3_pairs.cu is compiled for."""
    return dict(EXPERTS=experts, TOP=top, **e4m3_rows.sizes(inputs))


def encode(x: Tensor, groups: Groups, weights: Tensor, top: int, least: int) -> E4m3Pairs:
    """top: pairs of a row of x [T, I]; 0: x [P, I] is in the order of the groups. weights [T, k] f32: the pairs'.
    least: rows of codes that there are, as TMA's boxes have so many."""
    pairs, inputs = len(groups.order), x.shape[1]
    codes = torch.empty(max(pairs, least), inputs, dtype=torch.uint8, device=x.device)
    rows = E4m3Pairs(codes, *torch.empty(2, pairs, device=x.device))
    of = sizes(len(groups.ends) - 1, inputs, top)
    kernel = jit.kernel("e4m3_pairs", "e4m3_pairs", x.dtype, 0, **of)
    kernel((pairs, 1, 1), e4m3_rows.sizes(inputs)["THREADS"], x, groups.order, groups.ends, weights, *rows)
    return rows
