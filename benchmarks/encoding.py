"""How fast CPUs quantise a weight while loading: encoding and packing, by threads.

    OMP_WAIT_POLICY=passive python -m phalanx.benchmarks.encoding [--formats q4_k e4m3] [--threads 1 2] [--runs 9]

The weight is normally distributed. Times are medians, in seconds for a billion weights; formats and threads alternate,
so that what else the machine does slows all of them. Beside the clock's are the CPU's seconds of all threads and of the
one that waits for the others: they tell the work from the waiting, where others use the cores as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from phalanx.kernels.quantized import e4m3
from phalanx.kernels.quantized.ggml import CODECS

FORMATS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "e4m3")


def timed(call: Callable[..., Any], *values: Any) -> tuple[Any, list[float]]:
    """The call's result, and its seconds: of the clock, of all threads and of this one."""
    clocks = time.perf_counter, time.process_time, time.thread_time
    before = [clock() for clock in clocks]
    made = call(*values)
    return made, [clock() - first for clock, first in zip(clocks, before, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="the weight's")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--outputs", type=int, default=2048)
    parser.add_argument("--inputs", type=int, default=8192)
    args = parser.parse_args()
    weight = (torch.randn(args.outputs, args.inputs) * 0.03).to(getattr(torch, args.dtype))
    found = defaultdict[tuple[str, int, str], list[list[float]]](list)
    for run in range(1 + args.runs):  # the first one warms up
        for name in args.formats:
            codec = e4m3 if name == "e4m3" else CODECS[name.upper()]
            for threads in args.threads:
                torch.set_num_threads(threads)
                encoded, encoding = timed(codec.encode, weight)
                _, packing = timed(codec.pack, *encoded)
                if run > 0:
                    found[name, threads, "encode"].append(encoding)
                    found[name, threads, "pack"].append(packing)
    print("| format | threads | | s | CPU s | CPU s of one thread |\n|---|---|---|---|---|---|")
    for (name, threads, what), times in found.items():
        medians = (f"{statistics.median(one) / weight.numel() * 1e9:.1f}" for one in zip(*times, strict=True))
        print(f"| {name} | {threads} | {what} | {' | '.join(medians)} |")


if __name__ == "__main__":
    main()
