"""The figures of a run, and their table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .client import Answer
from .workload import Job

PERCENTILES = (50, 90, 95, 99)
REASONS = 10  # in the table; the JSON file has all
BUSY = 0.8  # of a core: from here on the client's own waiting is part of what it measures


@dataclass
class Result:
    """One request as the client saw it; times in seconds, `sent` after the run's start."""

    job: Job
    sent: float = 0.0
    retries: int = 0
    error: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    guessed_right: int = 0  # tokens that speculation guessed, as far as usage tells
    guessed_wrong: int = 0
    ttft: float = 0.0
    e2e: float = 0.0
    tpot: float | None = None  # None where only one token came
    gaps: list[float] = field(default_factory=list)
    finish: str | None = None
    text: str = ""


def rounded(value: Any) -> Any:
    """Seconds to the microsecond, however deep they are."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, interpolated between the two nearest values."""
    if not values:
        return {}
    ordered = sorted(values)
    found = {"mean": sum(ordered) / len(ordered)}
    for percent in PERCENTILES:
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        found[f"p{percent}"] = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return found


def summary(results: list[Result], wall: float, cpu: float) -> dict[str, Any]:
    """The figures of a run. Failed requests count in nothing but the failures."""
    good = [r for r in results if not r.error]
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    events = sum(len(r.gaps) + 1 for r in good)
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "retries": sum(r.retries for r in results),
        "failures": dict(Counter(r.error for r in results if r.error).most_common()),
        "wall_s": wall,
        "prompt_tokens": prompt,
        "cached_tokens": sum(r.cached_tokens for r in good),
        "output_tokens": output,
        "guessed_right": sum(r.guessed_right for r in good),
        "guessed_wrong": sum(r.guessed_wrong for r in good),
        "tokens_per_event": output / events if events else 0.0,
        "requests_per_s": len(good) / wall,
        "output_tokens_per_s": output / wall,
        "total_tokens_per_s": (prompt + output) / wall,
        "late_s": max((r.sent - r.job.due for r in results), default=0.0),
        "client_cpu": cpu / wall,
        "ttft_s": spread([r.ttft for r in good]),
        "tpot_s": spread([r.tpot for r in good if r.tpot is not None]),
        "itl_s": spread([gap for r in good for gap in r.gaps]),
        "e2e_s": spread([r.e2e for r in good]),
    }


def beside(stream: Answer, began: float, ended: float) -> dict[str, Any]:
    """The gaps of a stream before a run and in it."""
    gaps = [(after, after - before) for before, after in zip(stream.times, stream.times[1:], strict=False)]
    loaded = [gap for at, gap in gaps if at > began and at - gap < ended]
    return {
        "alone_s": spread([gap for at, gap in gaps if at <= began]),
        "beside_s": spread(loaded),
        "beside_longest_s": max(loaded, default=0.0),
        "beside_ended": stream.finish is not None,
    }


def table(run: dict[str, Any], rate: float = 0) -> str:
    """The summary for people; `rate` is the one that was asked for."""
    lines = [
        f"{run['requests']} requests in {run['wall_s']:.2f} s, {run['failed']} failed, {run['retries']} retries",
        f"tokens: {run['prompt_tokens']} prompt ({run['cached_tokens']} of them cached), "
        f"{run['output_tokens']} output, {run['tokens_per_event']:.2f} an event",
        f"requests/s {run['requests_per_s']:.2f}   output tokens/s {run['output_tokens_per_s']:.1f}   "
        f"total tokens/s {run['total_tokens_per_s']:.1f}",
    ]
    if guessed := run["guessed_right"] + run["guessed_wrong"]:
        lines.append(
            f"speculation: {run['guessed_right']} of {guessed} guessed tokens were right, "
            f"{run['guessed_right'] / max(1, run['output_tokens']):.0%} of the output"
        )
    heads = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    lines.append(" " * 20 + "".join(f"{head:>11}" for head in heads))
    for name, key in (
        ("TTFT ms", "ttft_s"),
        ("TPOT ms", "tpot_s"),
        ("inter-token ms", "itl_s"),
        ("end-to-end ms", "e2e_s"),
        ("stream alone ms", "alone_s"),
        ("beside the load ms", "beside_s"),
    ):
        if (found := run.get(key)) is None:
            continue
        lines.append(f"{name:20}" + "".join(f"{found[h] * 1000:11.2f}" if found else f"{'-':>11}" for h in heads))
    lines.append(f"client: {run['client_cpu']:.0%} of a core")
    if run["client_cpu"] > BUSY:
        lines.append("warning: the client was busy, latencies may be its own: split the load over several clients")
    if longest := run.get("beside_longest_s"):
        lines.append(f"longest gap of the stream beside the load: {longest * 1000:.2f} ms")
    if run.get("beside_ended"):
        lines.append("warning: the stream beside the load ended before it: ask for more tokens")
    if rate and run["late_s"] > 0.05:
        lines.append(f"warning: requests were sent up to {run['late_s']:.2f} s after they were due (--concurrency?)")
    return "\n".join(lines + _failures(run["failures"]))


def _failures(reasons: dict[str, int]) -> list[str]:
    """How often each; those that differ in numbers only are one, shown by its first."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason, count in reasons.items():
        kind = re.sub(r"(?<!HTTP )\b\d+\b", "N", reason)
        counts[first.setdefault(kind, reason)] += count
    shown = [f"{count:6} × {reason}" for reason, count in counts.most_common(REASONS)]
    if len(counts) > REASONS:
        shown.append(f"       … and {len(counts) - REASONS} other reasons")
    return ["failures:", *shown] if shown else []
