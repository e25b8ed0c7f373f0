"""Which of cuBLASLt's algorithms GEMMs of large M take: measured once per node, together with torch's choice.

It takes about four seconds for a model of 8 B parameters. What is found is kept on the node, so that other ranks and
later starts compute the same bits, and wait for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernel_cache
from ..collective.allreduce import SymmetricMemory
from . import gemm_reduce_scatter
from .cublaslt import ALGORITHM, TYPES, Algo, GemmShape, Library, in_use, plain, sizes_of

METHOD = 5  # of choosing; files that were made by another one are not read
GAIN = 0.98  # of the first algorithm's time that another may take to be chosen
SLOWER = 1.15  # times the fastest: not measured again
NEAREST = 3  # are measured again
LEADERS = 2  # of a number of rows, which are measured for all others, too
ROUNDS = 4  # of measuring the fastest again
READ = 100e6  # bytes of weights that launches read in a measurement: more than caches hold
AHEAD = 40_000  # cycles that the GPU waits for each launch, so that it never waits for one while it is measured


class TuneRequest(NamedTuple):
    """GEMMs that are measured."""

    weight: Tensor
    counts: Sequence[int]  # of rows
    peers: SymmetricMemory | None = None  # whose ranks their sums are scattered to
    bias: bool = False  # they add one


def tune(gemms: Iterable[TuneRequest]) -> str:
    """Choose on the current device and stream for these weights and numbers of their rows; a line for the log.

    Weights of equal sizes are measured alternately, as they come from memory in a model.
    """
    weights: dict[GemmShape, list[Tensor]] = {}
    counts: dict[GemmShape, set[int]] = {}
    targets: dict[GemmShape, SymmetricMemory | None] = {}
    for gemm in gemms:
        weight, rows, peers, bias = gemm
        if weight.dtype not in TYPES or not plain(weight):
            continue
        if peers:
            sizes = gemm_reduce_scatter.sizes(weight, peers, bias)
            rows = [n for n in rows if gemm_reduce_scatter.supports(n, weight, peers)]
        else:
            sizes = sizes_of(weight, bias)
        weights.setdefault(sizes, []).append(weight)
        counts.setdefault(sizes, set()).update(rows)
        targets[sizes] = peers
    wanted = [(sizes, sorted(counts[sizes])) for sizes in weights if counts[sizes]]
    if not wanted:
        return ""
    try:
        library = Library()
    except OSError as error:
        return f"GEMMs of many rows take torch's algorithms: {error}"
    started = time.monotonic()

    def measure() -> list[list[Algo]]:
        found = [_measure(library, sizes, weights[sizes], n, targets[sizes]) for sizes, n in wanted]
        torch.cuda.empty_cache()  # of what was multiplied: graphs have a pool of their own
        return found

    found, kept = remembered(about(library, wanted), measure)
    library.choose({sizes: dict(zip(n, row, strict=True)) for (sizes, n), row in zip(wanted, found, strict=True)})
    in_use[next(iter(weights.values()))[0].device] = library
    alone = [choice for (sizes, _), row in zip(wanted, found, strict=True) if not targets[sizes] for choice in row]
    how = f"{'read from this node' if kept else 'measured'} in {time.monotonic() - started:.1f} s"
    return f"{sum(map(bool, alone))} of {len(alone)} GEMMs of many rows take another algorithm than torch's, {how}"


def _measure(
    library: Library, sizes: GemmShape, weights: list[Tensor], counts: list[int], peers: SymmetricMemory | None
) -> list[Algo]:
    """The fastest for each number of rows.

    What the library proposes for one is at times faster than all that it proposes for another, so that the leaders of
    each are measured for all.
    """
    trial = Benchmark(library, sizes, weights, max(counts), peers)
    own = {rows: trial.own(rows) for rows in counts}
    leaders = [algo for rows, algos in own.items() for algo in near(algos, trial.times(rows, algos))[:LEADERS]]
    return [
        fastest(partial(trial.times, rows), list(dict.fromkeys((*algos[:1], *leaders)))) for rows, algos in own.items()
    ]


class Benchmark:
    """GEMMs of weights of one size, one after the other, as they come from memory in a model."""

    def __init__(
        self, library: Library, sizes: GemmShape, weights: list[Tensor], most: int, peers: SymmetricMemory | None
    ):
        """most: rows. peers: GEMMs scatter their sums to their ranks, which torch has no way to do."""
        weight, *_ = weights
        self._library, self._sizes, self._peers = library, sizes, peers
        self._turns = itertools.cycle(weights)
        self._launches = max(1, min(8, round(READ / weight.nbytes)))
        self._x = weight.new_empty(most, sizes.inputs).normal_()
        self._bias = weight.new_zeros(sizes.outputs) if sizes.bias else None
        self._y = weight.new_empty(0 if peers else most * sizes.outputs)
        self._works: dict[tuple[int, Algo], bool] = {}

    def own(self, rows: int) -> list[Algo]:
        """The algorithms for so many rows; the first is taken unless another is faster. Empty: there is none."""
        proposals: list[Algo] = [*self._library.proposals(self._sizes, rows)]
        return proposals if self._peers else [None, *proposals]

    def times(self, rows: int, algos: list[Algo]) -> list[float]:
        """Milliseconds of each; infinite where the library refuses."""
        calls = [self._call(rows, algo) for algo in algos]
        for algo, call in zip(algos, calls, strict=True):
            if (rows, algo) not in self._works:  # which loads the kernel, too
                self._works[rows, algo] = call(next(self._turns)) is not False
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in algos]
        torch.cuda._sleep(AHEAD * self._launches * len(algos))
        for algo, call, (start, end) in zip(algos, calls, marks, strict=True):
            start.record()
            for _ in range(self._launches if self._works[rows, algo] else 0):
                call(next(self._turns))
            end.record()
        torch.cuda.current_stream().synchronize()
        taken = [start.elapsed_time(end) for start, end in marks]
        return [ms if self._works[rows, algo] else math.inf for algo, ms in zip(algos, taken, strict=True)]

    def _call(self, rows: int, algo: Algo) -> Callable[[Tensor], Any]:
        x, sizes = self._x[:rows], self._sizes
        if algo is None:
            y = self._y[: rows * sizes.outputs].view(rows, -1)
            if (bias := self._bias) is not None:
                return lambda weight: torch.addmm(bias, x, weight.t(), out=y)
            return lambda weight: torch.mm(x, weight.t(), out=y)
        plan, added = self._library.plan_of(algo, sizes, rows), self._bias
        if self._peers is None:
            return partial(self._library.run, plan, x, y=self._y.data_ptr(), bias=added)
        peers = self._peers
        return lambda weight: self._library.run(
            plan, x, weight, gemm_reduce_scatter.address(rows, weight, peers), added
        )


def near(algos: list[Algo], times: list[float]) -> list[Algo]:
    """Which of these took the least time or little more, the fastest first."""
    limit = SLOWER * min(times, default=0)
    return [algo for ms, algo in sorted(zip(times, algos, strict=True), key=itemgetter(0)) if ms <= limit < math.inf]


def fastest(times: Callable[[list[Algo]], list[float]], algos: list[Algo]) -> Algo:
    """The first of these algorithms, unless another takes at most GAIN of its time; None where none works."""
    best = dict(zip(algos, times(algos), strict=True))
    fast = near(algos, list(best.values()))[:NEAREST]
    if not fast:
        return None
    usual, *_ = algos
    again = list(dict.fromkeys([usual, *fast]))
    for _ in range(ROUNDS if len(again) > 1 else 0):
        again.reverse()  # candidates alternate, so clock drift biases none
        for algo, taken in zip(again, times(again), strict=True):
            best[algo] = min(best[algo], taken)
    first = min(fast, key=best.__getitem__)
    return first if best[first] <= GAIN * best[usual] else usual


def about(library: Library, wanted: list[tuple[GemmShape, list[int]]]) -> list[Any]:
    """All that a choice depends on, as JSON has it."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    gemms = [[str(sizes.dtype), *sizes[1:], counts] for sizes, counts in wanted]
    return [METHOD, gpu.name, gpu.multi_processor_count, library.version, gemms]


def remembered(about: list[Any], measure: Callable[[], list[list[Algo]]]) -> tuple[list[list[Algo]], bool]:
    """The choices for each of about's GEMMs, and whether this node had them. Of several ranks one measures."""
    folder = kernel_cache.cache_folder()
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    file = folder / f"gemms-{key}.json"
    with kernel_cache.locked(folder / f"{key}.lock"):
        if (found := _read(file, about)) is not None:
            return found, True
        found = measure()
        text = json.dumps({"about": about, "choices": [[algo and algo.hex() for algo in row] for row in found]})
        with contextlib.suppress(OSError):  # a full disk costs the next start seconds
            kernel_cache.atomic_write(file, text.encode())
    return found, False


def _read(file: Path, about: list[Any]) -> list[list[Algo]] | None:
    """None: there is no file, it is damaged, or it belongs to something else."""
    try:
        kept = json.loads(file.read_text())
        found = [[None if algo is None else bytes.fromhex(algo) for algo in row] for row in kept["choices"]]
        whole = kept["about"] == about and [len(row) for row in found] == [len(gemm[-1]) for gemm in about[-1]]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    valid = all(algo is None or len(algo) == ALGORITHM for row in found for algo in row)
    return found if whole and valid else None
