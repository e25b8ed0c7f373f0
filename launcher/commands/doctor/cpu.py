"""This host's processors at a rank's work, all cores together, as JSON.

`python -m phalanx.launcher.commands.doctor.cpu`
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

SIDE = 2048  # of the matrices; 17 GFLOP a GEMM
BYTES = 512 << 20  # read for the bandwidth: larger than caches are
SECONDS = 1.5  # of each


def best(work: Callable[[], object], seconds: float = SECONDS) -> float:
    """The shortest of the calls that fit into the time: what the machine can do, not what its other users left."""
    deadline, found = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - start)
    return found


def measure(side: int = SIDE, size: int = BYTES, seconds: float = SECONDS) -> dict[str, float]:
    """`gflops`: f32 GEMM; `gbps`: GB/s of reading memory as a GEMV does."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    arithmetic = 2 * side**3 / best(lambda: a @ b, seconds) / 1e9
    rows = torch.ones(size // 4 // side, side)
    bandwidth = rows.nbytes / best(lambda: rows.mv(b[0]), seconds) / 1e9
    return {"gflops": arithmetic, "gbps": bandwidth, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    print(json.dumps(measure()))
