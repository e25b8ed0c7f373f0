"""Whether a step on a CPU is computed by kernels/compiled.py: of few rows, in f32, on one core, where Numba is."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("phalanx")
MOST_ROWS = 16  # of more, the library's products of plain weights are faster


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        from . import compiled
    except ImportError:
        log.info("Numba is not installed (phalanx[cpu]): a sequence alone takes up to three times as long on one core")
        return None
    except Exception as error:  # torch can do without it
        log.warning("torch computes steps of few rows, as Numba cannot compile them here: %s", error)
        return None
    return compiled


def one_core(x: Tensor, most: int = MOST_ROWS) -> ModuleType | None:
    """kernels/compiled.py, if it takes x [T, ...] and is faster; None: torch is to do it."""
    few = 0 < len(x) <= most and x.dtype == torch.float32 and x.device.type == "cpu"
    return _compiled() if few and torch.get_num_threads() == 1 else None


def array(x: Tensor) -> np.ndarray:
    """x's memory, of a tensor that is used more than once and stays where it is: a weight, a cache, a step's input."""
    kept = x.__dict__
    if "array" not in kept:
        kept["array"] = x.numpy()
    return kept["array"]


def flat(x: Tensor) -> Tensor:
    """The memory from x's first element on, where x [T, heads, dim] has rows of heads that lie side by side."""
    return x.as_strided(((len(x) - 1) * x.stride(0) + x[0].numel(),), (1,))
