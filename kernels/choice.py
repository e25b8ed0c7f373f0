"""Which of cuBLASLt's algorithms products of many rows take: measured once per node, beside what torch takes.

It takes one to two seconds for a model of 8 B parameters. What is found is kept on the node, so that other ranks and
later starts compute the same bits, and wait for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import jit, spread
from .allreduce import Peers
from .library import MOST, TYPES, Library, Sizes, in_use, plain

# Of the first way's time that another may take to be chosen. A GPU's clock moves by a few percent while it measures:
# prompts of thousands of rows, where no proposal is more ahead than that, are left to torch.
GAIN = 0.92
SPREAD_GAIN = 0.97  # of the first proposal's, where products are spread over ranks and differ by more
SLOWER = 1.15  # times the fastest: not measured again
ROUNDS = 3  # of measuring the fastest again
READ = 100e6  # bytes of weights that launches read in a measurement: more than caches hold
AHEAD = 400_000  # cycles that the GPU waits, so that it never waits for launches while it is measured


class Wanted(NamedTuple):
    """Products that are measured."""

    weight: Tensor
    counts: Sequence[int]  # of rows
    peers: Peers | None = None  # over whose ranks they are spread


def choose(products: Iterable[Wanted]) -> str:
    """Choose on the current device and stream for these weights and numbers of their rows; a line for the log.

    Weights of equal sizes are measured by turns, as they come from memory in a model.
    """
    weights: dict[Sizes, list[Tensor]] = {}
    counts: dict[Sizes, set[int]] = {}
    targets: dict[Sizes, Peers | None] = {}
    for weight, rows, peers in products:
        if weight.dtype in TYPES and plain(weight):
            sizes = spread.sizes(weight, peers) if peers else Sizes(weight.dtype, *weight.shape)
            weights.setdefault(sizes, []).append(weight)
            counts.setdefault(sizes, set()).update(n for n in rows if not peers or spread.suits(n, weight, peers))
            targets[sizes] = peers
    wanted = [(sizes, sorted(counts[sizes])) for sizes in weights if counts[sizes]]
    if not wanted:
        return ""
    try:
        library = Library()
    except OSError as error:
        return f"products of many rows take torch's algorithms: {error}"
    started = time.monotonic()

    def measure() -> list[list[int]]:
        return [_measure(library, sizes, weights[sizes], n, targets[sizes]) for sizes, n in wanted]

    found, kept = remembered(about(library, wanted), measure)
    library.choices = {sizes: dict(zip(n, row, strict=True)) for (sizes, n), row in zip(wanted, found, strict=True)}
    in_use[next(iter(weights.values()))[0].device] = library
    plain_ones = [choice for (sizes, _), row in zip(wanted, found, strict=True) if not targets[sizes] for choice in row]
    how = f"{'read from this node' if kept else 'measured'} in {time.monotonic() - started:.1f} s"
    return (
        f"{sum(map(bool, plain_ones))} of {len(plain_ones)} products of many rows take another algorithm than torch's, "
        f"{how}"
    )


def _measure(
    library: Library, sizes: Sizes, weights: list[Tensor], counts: list[int], peers: Peers | None
) -> list[int]:
    """The fastest for each number of rows."""
    turns = itertools.cycle(weights)
    found = [_measure_rows(library, sizes, turns, rows, peers) for rows in counts]
    torch.cuda.empty_cache()  # graphs have a pool of their own
    return found


def _measure_rows(library: Library, sizes: Sizes, turns: Iterator[Tensor], rows: int, peers: Peers | None) -> int:
    """Torch has no way to spread what it multiplies: then the first proposal is what the others have to beat."""
    weight = next(turns)
    x = weight.new_empty(rows, sizes.inputs).normal_()
    ways: dict[int, Callable[[Tensor], Any]] = {}
    if peers:
        to = spread.address(rows, weight, peers)
    else:
        y = weight.new_empty(rows, sizes.outputs)
        to, ways[0] = y.data_ptr(), lambda w: torch.mm(x, w.t(), out=y)
    for i, plan in enumerate(library.proposals(sizes, rows), 1):
        ways[i] = partial(library.run, plan, x, y=to)
    launches = max(1, min(8, round(READ / weight.nbytes)))
    taken = [i for i, way in ways.items() if way(next(turns)) is not False]  # the first call loads the kernel

    def times(which: list[int]) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in which]
        torch.cuda._sleep(AHEAD)
        for i, (start, end) in zip(which, marks, strict=True):
            start.record()
            for _ in range(launches):
                ways[i](next(turns))
            end.record()
        torch.cuda.current_stream().synchronize()
        return [start.elapsed_time(end) for start, end in marks]

    return fastest(times, taken, SPREAD_GAIN if peers else GAIN) if taken else 0


def fastest(times: Callable[[list[int]], list[float]], ways: list[int], gain: float = GAIN) -> int:
    """Of these ways the first, unless another takes at most `gain` of its time, by their `times`."""
    usual, *_ = ways
    best = dict(zip(ways, times(ways), strict=True))
    limit = SLOWER * min(best.values())
    near = sorted((i for i in ways if i != usual and best[i] <= limit), key=best.__getitem__)[:3]
    for _ in range(ROUNDS if near else 0):
        for i, taken in zip([usual, *near], times([usual, *near]), strict=True):
            best[i] = min(best[i], taken)
    first = min(near, key=best.__getitem__, default=usual)
    return first if best[first] <= gain * best[usual] else usual


def about(library: Library, wanted: list[tuple[Sizes, list[int]]]) -> list[Any]:
    """All that a choice depends on, as JSON has it."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    products = [[str(sizes.dtype), *sizes[1:], counts] for sizes, counts in wanted]
    return [gpu.name, gpu.multi_processor_count, library.version, products]


def remembered(about: list[Any], measure: Callable[[], list[list[int]]]) -> tuple[list[list[int]], bool]:
    """The choices for each of about's products, and whether this node had them. Of several ranks one measures."""
    folder = jit.cache_folder()
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    file = folder / f"products-{key}.json"
    with jit.locked(folder / f"{key}.lock"):
        if (found := _read(file, about)) is not None:
            return found, True
        found = measure()
        with contextlib.suppress(OSError):  # a full disk costs the next start a second
            jit.keep(file, json.dumps({"about": about, "choices": found}).encode())
    return found, False


def _read(file: Path, about: list[Any]) -> list[list[int]] | None:
    """None: there is no file, it is damaged, or it belongs to something else."""
    try:
        kept = json.loads(file.read_text())
        found = kept["choices"]
        lengths = [len(product[-1]) for product in about[-1]]
        whole = kept["about"] == about and [len(row) for row in found] == lengths
        valid = all(type(choice) is int and 0 <= choice <= MOST for row in found for choice in row)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if whole and valid else None
