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
PATIENCE = 2e-3  # seconds until a rank that waits sleeps between its looks
SLEEP = 5e-5


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
        started = 0.0
        while not function(*arguments, self.slots, self.counts, self.rank, self.calls):
            now = time.monotonic()
            started = started or now
            if now - started < PATIENCE:
                os.sched_yield()
            else:
                time.sleep(SLEEP)
