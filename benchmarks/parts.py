"""Parts (a), (b) and (c) of offline.py, the same for Phalanx and its peers: fields of a JSON line for each result.

`generate(prompts, outs)` is the engine's: seconds for prompts of these lengths, each followed by so many tokens.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

Generate = Callable[[list[int], list[int]], float]
SHORT, LONG = 32, 256  # new tokens, whose difference in time leaves the prompts out


def decode(generate: Generate, batch: int, length: int, reps: int) -> dict[str, Any]:
    def times(new: int, count: int) -> list[float]:
        return [generate([length] * batch, [new] * batch) for _ in range(count)]

    times(8, 1)
    shorts, longs = times(SHORT, reps), times(LONG, reps)
    ms = (min(longs) - min(shorts)) / (LONG - SHORT) * 1e3
    median = (statistics.median(longs) - statistics.median(shorts)) / (LONG - SHORT) * 1e3
    return dict(what="decode", batch=batch, prompt=length, new=LONG, ms_per_token=round(ms, 4),
                ms_per_token_median=round(median, 4), tokens_per_s=round(batch / ms * 1e3, 1),
                total_s=round(min(longs), 4), short_s=round(min(shorts), 4))  # fmt: skip


def prefill(generate: Generate, batch: int, length: int, reps: int) -> dict[str, Any]:
    _, *times = (generate([length] * batch, [1] * batch) for _ in range(reps + 1))
    return dict(what="prefill", batch=batch, prompt=length, best_s=round(min(times), 5),
                median_s=round(statistics.median(times), 5),
                tokens_per_s=round(batch * length / min(times), 1))  # fmt: skip


def prefills(longest: int) -> list[tuple[int, int]]:
    """Part (b): how many prompts of how many tokens, where a sequence has `longest` tokens at most."""
    return [(batch, length) for batch, length in ((1, longest - 1), (16, 1024)) if length < longest]


def requests(count: int, longest: int) -> tuple[list[int], list[int]]:
    """Lengths of part (c)'s prompts and answers."""
    r = random.Random(0)
    lengths = [r.randint(64, 1024) for _ in range(count)]
    outs = [r.randint(64, 512) for _ in range(count)]
    return [min(p, longest - o) for p, o in zip(lengths, outs, strict=True)], outs


def mixed(generate: Generate, count: int, longest: int, reps: int) -> Iterator[dict[str, Any]]:
    lengths, outs = requests(count, longest)
    generate(lengths[:32], outs[:32])
    for rep in range(2 if reps > 1 else 1):
        seconds = generate(lengths, outs)
        yield dict(what="mixed", rep=rep, requests=count, prompt_tokens=sum(lengths), output_tokens=sum(outs),
                   seconds=round(seconds, 3), output_tokens_per_s=round(sum(outs) / seconds, 1),
                   total_tokens_per_s=round((sum(lengths) + sum(outs)) / seconds, 1),
                   requests_per_s=round(count / seconds, 2))  # fmt: skip
