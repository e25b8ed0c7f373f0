"""How a step's experts are served, in numpy: what host_experts.cpp is compared with."""

from __future__ import annotations

import numpy as np
from phalanx.kernels.moe.host_choice import ADOPTED, CHEAPEST, COPIED, DECAY, Choice, Costs, Residency, above
from torch import Tensor


def choose(choice: Choice, ids: Tensor, of: Residency, limit: int = 1 << 30, adopts: bool = False) -> None:
    """`Choice.choose`."""
    local = ids.numpy().reshape(-1) - choice.first
    experts, fixed = len(choice.counts), len(choice.of_fixed)
    choice.of_fixed[:] = np.bincount(local[(local >= -fixed) & (local < 0)] + fixed, minlength=fixed)
    choice.counts[:] = np.bincount(local[(local >= 0) & (local < experts)], minlength=experts)
    of.scores[:] = of.scores * DECAY + (choice.counts > 0)
    chosen = np.flatnonzero((choice.counts > 0) & (of.slot_of < 0))
    most, fewest = len(chosen) if choice.mode == COPIED else 0, 0
    if choice.mode == CHEAPEST:
        chosen = chosen[np.argsort(-choice.counts[chosen], kind="stable")]
    if choice.mode in (CHEAPEST, ADOPTED) and adopts and len(chosen) and limit > 0:
        wanted = chosen[of.scores[chosen].argmax()]
        if slot_for(choice, wanted, of) >= 0:
            chosen, fewest = np.concatenate(([wanted], chosen[chosen != wanted])), 1
    if choice.mode == CHEAPEST:
        cpu = choice.costs.of_rows(choice.counts[chosen])
        left = np.concatenate((np.cumsum(cpu[::-1])[::-1], [0.0]))  # of the CPU, where the first n are copied
        copies = np.arange(len(chosen) + 1)
        times = both(choice.costs, left, copies * choice.costs.copy + (copies > 0) * choice.lag)
        most = fewest + int(np.argmin(times[fewest : limit + 1]))
    here = chosen[most:]  # on the CPU
    if choice.mode == ADOPTED:
        most = fewest
    choice._copied[: len(chosen)] = chosen
    choice.cpu[:] = -1
    choice.cpu[here] = here
    for i, expert in enumerate(chosen[:most].tolist()):
        slot = choice._adopted[i] = slot_for(choice, expert, of) if adopts else -1
        if slot >= 0:
            of.slot_of[of.expert_in[slot]] = -1
            of.expert_in[slot], of.slot_of[expert] = expert, slot
    resident, made = int((choice.counts > 0).sum()) - len(chosen), int((choice._adopted[:most] >= 0).sum())
    resident += int((choice.of_fixed > 0).sum())
    choice.found[:] = resident, len(here), most, choice.counts[here].sum(), made


def slot_for(choice: Choice, expert: int, of: Residency) -> int:
    """The slot whose expert has the lowest score, of those that no token has chosen, if it is far below that of
    `expert`; else -1."""
    experts = of.expert_in
    spared = (of.slot_of[experts] != np.arange(len(experts))) | (choice.counts[experts] > 0)
    scores = np.where(spared, np.inf, of.scores[experts])
    if not len(experts) or scores.min() == np.inf:
        return -1
    slot = int(scores.argmin())
    return slot if above(of.scores[expert], scores[slot]) else -1


def both(costs: Costs, cpu: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """The time of CPU and copies that begin together: who is left has all of the memory."""
    cpu, copies = cpu * costs.cpu_overlapped, copies * costs.copy_overlapped
    shorter = np.minimum(cpu, copies)
    return shorter + (cpu - shorter) / costs.cpu_overlapped + (copies - shorter) / costs.copy_overlapped
