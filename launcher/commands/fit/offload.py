"""The time of experts in host memory, served as rank/model/experts/host.py does it.

The resident ones are computed on the GPU. Of the others the CPU computes some where they lie, while the GPU brings over
and computes the rest; both read the host's one memory. The resident set follows the routing, so the experts that are
not resident are those that are chosen least, of all but the fixed ones. How much less is the user's --zipf.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from .devices import Host
from .shape import StageShape, Weights

# Tokens of steps that are one launch; routed tokens that the CPU alone computes there, where some
# experts are resident and it takes at most so many times a copy's time for one; rank/model/experts/small_batch.py
FEW, CPU_ROUTED, DEARER = 16, 16, 2.0
LOOKED, ALL = 512, 4  # beyond which no step looks at what was chosen, but copies all; rank/model/experts/host.py
PCIE = 54e9  # bytes/s from the host's memory to one GPU, measured with two GPUs at once
COPIED = 0.83  # of that, what copies of one expert after the other reach: 42 to 47 GB/s beside an H200, 2026-11-25
# Seconds of a layer until GPU and host know what the other has: what steps of one sequence took on an H200 on top of
# their experts (2026-11-26, 65d1280). MANY_FIXED: of more tokens, with more Python launches each layer: 265 us of a
# step with half of the experts on an H200 (2026-11-25, 5cc20ab), less 52 of the GPU's and 56 of the CPU's.
FIXED, MANY_FIXED = 15e-6, 157e-6
# Seconds in which a step of a small batch copies nothing, for each of both GEMMs: half of what kernels for copied
# experts add to a layer on top of reading them, on that H200. The CPU computes meanwhile.
MAKING_OVER = 31e-6


def cpu_alone(host: Host, pairs: int, share: float) -> bool:
    """Whether the CPU computes all that is missing of so many routed tokens. share: of them that is
    resident."""
    return share > 0 and pairs <= CPU_ROUTED and host.cpu * DEARER >= PCIE * COPIED


def fixed(tokens: int) -> float:
    return FIXED if tokens <= FEW else MANY_FIXED


def streamed(tokens: int, chosen: int, experts: int) -> bool:
    """Whether all that is not resident is copied, while the layers before are computed."""
    return tokens > LOOKED and tokens * chosen >= ALL * experts


def resident(experts: Weights, offload: int) -> float:
    """The share of a rank's experts that is."""
    return max(0, experts.copies - offload) / experts.copies


@functools.cache
def chances(experts: int, chosen: int, tokens: int, zipf: float) -> tuple[float, ...]:
    """The chance that any of so many tokens chooses each expert, the most popular first. A token draws `chosen` of
    them, the i-th with a weight of i ** -zipf; 0: evenly."""
    weights = [i**-zipf for i in range(1, experts + 1)]
    low, high = 0.0, float(chosen) * experts**zipf * 64  # of the rate with which a token draws, `chosen` in all
    for _ in range(100):
        rate = (low + high) / 2
        drawn = sum(1 - math.exp(-rate * one) for one in weights)
        low, high = (rate, high) if drawn < chosen else (low, rate)
    return tuple(1 - math.exp(-rate * one * tokens) for one in weights)


class Missing(NamedTuple):
    """A rank's experts of a layer that are not on its GPU."""

    experts: int  # of the layer, on the rank
    offload: int  # that are missing
    fixed: int  # of the others, those that do not follow the routing

    def share(self, chances: Sequence[float]) -> float:
        """The number of visited experts, by each one's chance."""
        follow = max(self.experts - self.fixed, 1)
        count = min(1.0, self.offload / follow) * len(chances)  # of all, the least popular
        whole = int(count)
        tail = sum(chances[len(chances) - whole :]) + (count - whole) * chances[max(0, len(chances) - whole - 1)]
        return tail / sum(chances) * min(1.0, follow / self.experts)


def missing(stage: StageShape, offload: int) -> float:
    """Bytes of host memory of those that are not."""
    return sum(one.host * min(offload, one.copies) for one in stage.weights if one.expert)


def beside(host: Host, tokens: int, alone: bool, computed: float, missed: float, work: float) -> float:
    """Seconds that both sides take. alone: as `cpu_alone` has it. computed: the GPU's, for resident experts. missed:
    bytes of chosen experts that are not resident, whose FLOP are `work`.

    Else the GPU copies a part of them: of small batches by kernels, after it has computed what is resident, while the
    CPU has begun; of larger ones on side streams.
    """
    if not missed:
        return computed
    cpu = missed / max(missed / host.cpu, work / host.flops)  # bytes/s
    if alone:
        return max(computed, missed / cpu)
    begun = computed + MAKING_OVER if tokens <= FEW else 0.0
    left = max(0.0, missed - cpu * begun)
    return max(computed, begun + left / min(host.bandwidth, cpu + PCIE * COPIED))
