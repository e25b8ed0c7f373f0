"""Which of cuBLASLt's algorithms products of many rows take: measured once per node, beside what torch takes.

It takes about a second for a model of 8 B parameters. What is found is kept on the node, so that other ranks and later
starts compute the same bits, and wait for nothing.
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
from typing import Any

import torch
from torch import Tensor

from . import jit
from .library import MOST, TYPES, Library, Sizes, in_use, plain

# Of torch's time that a proposal may take to be chosen. A GPU's clock moves by a few percent while it measures: prompts
# of thousands of rows, where no proposal is more ahead than that, are left to torch.
GAIN = 0.92
SLOWER = 1.15  # times the fastest: not measured again
ROUNDS = 3  # of measuring the fastest again
READ = 100e6  # bytes of weights that launches read in a measurement: more than caches hold
AHEAD = 400_000  # cycles that the GPU waits, so that it never waits for launches while it is measured


def choose(products: Iterable[tuple[Tensor, Sequence[int]]]) -> str:
    """Choose on the current device and stream for these weights and numbers of their rows; a line for the log.

    Weights of equal sizes are measured by turns, as they come from memory in a model.
    """
    weights: dict[Sizes, list[Tensor]] = {}
    counts: dict[Sizes, set[int]] = {}
    for weight, rows in products:
        if weight.dtype in TYPES and plain(weight):
            sizes = Sizes(weight.dtype, *weight.shape)
            weights.setdefault(sizes, []).append(weight)
            counts.setdefault(sizes, set()).update(rows)
    wanted = [(sizes, sorted(counts[sizes])) for sizes in weights if counts[sizes]]
    if not wanted:
        return ""
    try:
        library = Library()
    except OSError as error:
        return f"products of many rows take torch's algorithms: {error}"
    started = time.monotonic()
    found, kept = remembered(about(library, wanted), lambda: [_measure(library, weights[s], n) for s, n in wanted])
    library.choices = {sizes: dict(zip(n, row, strict=True)) for (sizes, n), row in zip(wanted, found, strict=True)}
    in_use[next(iter(weights.values()))[0].device] = library
    others, total = sum(map(bool, itertools.chain(*found))), sum(map(len, found))
    how = f"{'read from this node' if kept else 'measured'} in {time.monotonic() - started:.1f} s"
    return f"{others} of {total} products of many rows take another algorithm than torch's, {how}"


def _measure(library: Library, weights: list[Tensor], counts: list[int]) -> list[int]:
    """The fastest for each number of rows."""
    turns = itertools.cycle(weights)
    found = [_measure_rows(library, turns, weights[0], rows) for rows in counts]
    torch.cuda.empty_cache()  # graphs have a pool of their own
    return found


def _measure_rows(library: Library, turns: Iterator[Tensor], weight: Tensor, rows: int) -> int:
    outputs, inputs = weight.shape
    x, y = weight.new_empty(rows, inputs).normal_(), weight.new_empty(rows, outputs)
    ways: list[Callable[[Tensor], Any]] = [lambda w: torch.mm(x, w.t(), out=y)]
    for plan in library.proposals(Sizes(weight.dtype, outputs, inputs), rows):
        ways.append(partial(library.run, plan, x, y=y.data_ptr()))
    launches = max(1, min(8, round(READ / weight.nbytes)))
    taken = [i for i, way in enumerate(ways) if way(next(turns)) is not False]  # the first call loads the kernel

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

    return fastest(times, taken)


def fastest(times: Callable[[list[int]], list[float]], ways: list[int]) -> int:
    """Of these ways; torch's, which is number 0 and always there, unless another is clearly faster by their `times`."""
    best = dict(zip(ways, times(ways), strict=True))
    limit = SLOWER * min(best.values())
    near = sorted((i for i in ways if i and best[i] <= limit), key=best.__getitem__)[:3]
    for _ in range(ROUNDS if near else 0):
        for i, taken in zip([0, *near], times([0, *near]), strict=True):
            best[i] = min(best[i], taken)
    first = min(near, key=best.__getitem__, default=0)
    return first if best[first] <= GAIN * best[0] else 0


def about(library: Library, wanted: list[tuple[Sizes, list[int]]]) -> list[Any]:
    """All that a choice depends on, as JSON has it."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    products = [[str(sizes.dtype), sizes.outputs, sizes.inputs, counts] for sizes, counts in wanted]
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
