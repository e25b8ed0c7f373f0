"""Time and energy of calls on a GPU, in a CUDA graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from phalanx.rank import nvml

Call = Callable[[], Any]


def captured(calls: list[Call], least: int) -> tuple[Call, int]:
    """A function that replays a graph of at least so many calls, and their number. On the current stream."""
    rounds = max(1, least // len(calls))
    for call in calls:
        call()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(rounds):
        for call in calls:
            call()
    graph.capture_end()
    graph.replay()
    return graph.replay, rounds * len(calls)


def side_stream() -> torch.cuda.Stream:
    """Graphs cannot be captured on the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def measure(calls: list[Call], least: int = 16, repeats: int = 20, before: Call = lambda: None) -> float:
    """Microseconds of one call, the fastest graph's of at least so many. before: what each graph's start waits for."""
    with torch.cuda.stream(side_stream()):
        replay, count = captured(calls, least)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        best = float("inf")
        for _ in range(repeats):
            before()
            start.record()
            replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
    return best * 1e3 / count


def energy(calls: list[Call], least: int = 16, seconds: float = 2.0) -> float:
    """Joules of one call that is repeated for so long, with all that the GPU uses meanwhile. NaN: it does not tell."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[torch.cuda.current_device()]

    def joules() -> float:
        try:
            return nvml.joules([gpu])
        except OSError:
            return float("nan")

    with torch.cuda.stream(side_stream()):
        replay, count = captured(calls, least)
        stream = torch.cuda.current_stream()

        def repeat(times: int) -> float:
            begun = time.perf_counter()
            for _ in range(times):
                replay()
            stream.synchronize()
            return time.perf_counter() - begun

        def settle() -> tuple[int, float]:
            """Go on until the counter moves, as it does every 20 to 100 ms: how many times, and its value then."""
            times, before = 0, joules()
            while (now := joules()) == before:
                repeat(1)
                times += 1
            return times, now

        _, before = settle()
        most = max(1, int(seconds / repeat(1)))
        repeat(most)
        more, after = settle()
    return (after - before) / (1 + most + more) / count
