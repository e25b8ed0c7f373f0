"""Quantised experts of many pairs: some experts at a time become plain, for grouped GEMMs of plain weights.

Dequantising reads and writes memory once for all of an expert's pairs, and GEMMs of plain weights need fewer
instructions for each. So from so many pairs per expert on this is faster than multiplying codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..quantized.floats import Floats
from ..quantized.stack import Stack
from .group import Groups

# Pairs per expert; of more it should be faster, by an estimate that gives 93, and wgmma_experts.py takes more of plain
# experts, too. A border of moe.TILINGS, so that what is above it is warmed up.
LEAST_PAIRS = 96
AT_ONCE = 1 << 27  # elements that are plain at once: 256 MB in 16 bits

Multiply = Callable[[Tensor | Floats, Groups, Tensor | None], object]


def by_parts(
    stack: Tensor | Floats | Stack, groups: Groups, bias: Tensor | None, dtype: torch.dtype, multiply: Multiply
) -> None:
    """Call multiply(weights, groups, bias) for some experts after the others, or once where the stack is not packed.

    The groups' places are the same in all calls. A call has the tiles of its own experts alone, whose numbers begin at
    0 there. bias [E, outputs].
    """
    if not isinstance(stack, Stack):
        multiply(stack, groups, bias)
        return
    for first, last in ranges(*stack.shape):
        own = None if bias is None else bias[first:last]
        # No name holds the weights, so that the next ones get their memory.
        multiply(stack.some(first, last, dtype), part_of(groups, first, last), own)


def ranges(experts: int, outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """First and last of the experts that are plain at once, parts of nearly one size."""
    count = -(-experts // max(1, AT_ONCE // (outputs * inputs)))
    return ((experts * i // count, experts * (i + 1) // count) for i in range(count))


def part_of(groups: Groups, first: int, last: int) -> Groups:
    """Without the tiles of other experts than first to last, which are numbered from 0 on."""
    if (first, last) == (0, len(groups.ends) - 1):
        return groups  # all of them: nothing is launched
    tiles = groups.tile_expert
    mine = torch.where((tiles >= first) & (tiles < last), tiles - first, -1)
    # Theirs first, as kernels end at the first that is not needed.
    order = (mine < 0).to(torch.uint8).argsort(stable=True)
    ends = groups.ends[first : last + 1].clone()  # kernels like it aligned
    return groups._replace(tile_expert=mine[order], tile_start=groups.tile_start[order], ends=ends)
