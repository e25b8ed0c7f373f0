"""The time of a GPU's steps, kernel by kernel; offline.py's parts p and t."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

STEP, LAST = "decode_inputs", "argmax"  # the kernels that a replayed step begins and ends with
SKIP = 4  # steps before the first that counts


def traced(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The GPU's work meanwhile: kernels and copies with `name`, `ts` and `dur` in us, by their end."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        found.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"] + e["dur"])


def budget(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A step's kernels: for each its calls, its share `us`, and how long it `lasts`, most first.

    Kernels overlap: one starts while its predecessor still runs. A kernel's share is the time from the end of all
    before it to its own end, so that shares add up to the step; a gap before it is in it.
    """
    starts = [i for i, event in enumerate(events) if STEP in event["name"]]
    if len(starts) < SKIP + 2:
        raise SystemExit(f"part p needs {SKIP + 2} replayed decode steps and found {len(starts)}: one stage, on a GPU")
    first, last = starts[SKIP], starts[-1]
    calls: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    before = events[first - 1]["ts"] + events[first - 1]["dur"]
    for event in events[first:last]:
        end = event["ts"] + event["dur"]
        calls[short(event["name"])].append((end - before, event["dur"]))
        before = end
    steps = len(starts) - 1 - SKIP
    lines = [
        dict(kernel=name, calls=round(len(found) / steps, 2), us=round(sum(f[0] for f in found) / steps, 2),
             lasts=round(sum(f[1] for f in found) / len(found), 2))
        for name, found in calls.items()
    ]  # fmt: skip
    return sorted(lines, key=lambda line: -line["us"])


def idle(events: list[dict[str, Any]]) -> float:
    """Microseconds before a replayed step in which no kernel runs: the median."""
    gaps, ended, before = [], 0.0, ""
    for event in sorted((e for e in events if e["cat"] == "kernel"), key=lambda e: e["ts"]):
        if STEP in event["name"] and STEP not in before:  # each cache group has such a kernel
            gaps.append(max(0.0, event["ts"] - ended))
        ended, before = max(ended, event["ts"] + event["dur"]), event["name"]
    return statistics.median(gaps[SKIP:])


def shares(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds by kernel, most first, in budget's shares: of `decode` steps, which are replayed, and of the `prompt`
    steps between."""
    found: dict[str, defaultdict[str, float]] = {"decode": defaultdict(float), "prompt": defaultdict(float)}
    kind, before = "prompt", events[0]["ts"]
    for event in events:
        if STEP in event["name"]:
            kind = "decode"
        end = event["ts"] + event["dur"]
        found[kind][short(event["name"])] += (end - before) / 1e6
        before = end
        if LAST in event["name"]:
            kind = "prompt"
    return {
        kind: {name: round(seconds, 4) for name, seconds in sorted(names.items(), key=lambda item: -item[1])}
        for kind, names in found.items()
    }


def short(name: str) -> str:
    """A kernel's name without its return type, its arguments and the most of its template's."""
    bare = re.sub(r"^void |\(anonymous namespace\)::|at::native::", "", name)
    return re.sub(r"\(.*", "", bare)[:70]
