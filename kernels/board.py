"""Memory that one-core ranks of a host share, over which they add up: what comm/shared.py makes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

LINE = 8  # counts are a cache line each
# A rank that waits gives its core away so often before it sleeps, as shortly as Linux allows (50 us). Many yields in a
# row are bad manners: the scheduler of 6.18 then keeps processes of other sessions, the front's too, off the core for
# seconds (tests/test_idle.py).
YIELDS = 4
SLEEP = 1e-6


@dataclass
class Board:
    """In each call a rank lays its part out, says so by counting on, waits for the others' counts and adds up in rank
    order. Two slots by turns: who fills one again has met all ranks since they read it.
    """

    slots: np.ndarray  # [2, ranks, most elements] f32
    counts: np.ndarray  # [ranks * LINE] int64, zeros before the first call
    rank: int
    calls: int = 0

    def takes(self, x: Tensor, times: int = 1) -> bool:
        """Whether so many of x can be summed at once: the same on all ranks."""
        return x.dtype == torch.float32 and 0 < x.numel() * times <= self.slots.shape[2]

    def meet(self, function: Callable[..., bool], *arguments: Any) -> None:
        """Call one of the functions of compiled.py that begin with all_reduce.

        They look for the others a while, without the interpreter's lock, and if in vain can be called again.
        """
        self.calls += 1
        tries = 0
        while not function(*arguments, self.slots, self.counts, self.rank, self.calls):
            tries += 1
            if tries <= YIELDS:
                os.sched_yield()
            else:
                time.sleep(SLEEP)
