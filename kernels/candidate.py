"""The kernel contract: each way to compute what a family computes is declared once, in its own file, as a Candidate.

A family's dispatcher takes the first candidate that supports what it is given. What is compiled ahead follows from the
same rule (`variant`), and docs/kernel-table.md lists the declarations (document.py), so that no threshold is written
twice.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .jit import KernelVariant


class Candidate(NamedTuple):
    """A kernel, or a library's, of a family whose dispatcher defines the functions' arguments."""

    name: str  # of its source
    devices: str
    takes: str  # rows, dtypes, sizes
    supports: Callable[..., bool]
    run: Callable[..., Any]
    # The kernel for so many rows, where the dispatcher would take this candidate; None: it would not.
    variant: Callable[..., KernelVariant | None] | None = None


def imported_late(module: str, devices: str, takes: str) -> Candidate:
    """The candidate that a module with `supports` and `run` is, which is imported when it is first asked: it imports
    triton."""

    def call(function: str, given: tuple[Any, ...]) -> Any:
        return getattr(importlib.import_module(module), function)(*given)

    name = module.rpartition(".")[2] + ".py"
    return Candidate(name, devices, takes, lambda *given: call("supports", given), lambda *given: call("run", given))


def choose(candidates: Sequence[Candidate], *given: Any) -> Candidate | None:
    """The first that supports what is given."""
    return next((one for one in candidates if one.supports(*given)), None)
