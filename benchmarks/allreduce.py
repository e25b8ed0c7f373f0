"""All-reduces of a tensor group: NCCL and the kernels over mapped memory, alone and with the norm that follows.

    python benchmarks/allreduce.py --np 2 [--width 4096] [--rows 16,64] [--only norm] [--search] [--json FILE]

Microseconds of one call in a CUDA graph of 50, the best of 20 replays, the slowest rank's; bf16, rows of --width
elements as in a decode step of that many sequences. "one kernel" is the all-reduce with the norm as it is chosen, next
to it all ways; of more than two ranks a row or two are normed after the sum ("chosen, norm"). --search tries numbers of
blocks and threads, --only measures what has this in its name. --inputs: also what a GEMM of so many inputs takes with
the sum and the norm that follow, one after the other and with the sum scattered (kernels/gemm/gemm_reduce_scatter.py).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from phalanx.benchmarks import timing
from phalanx.benchmarks.ops_table import copies
from phalanx.comm import custom_allreduce, mpi
from phalanx.comm.base import all_reduce_add_norm
from phalanx.comm.nccl import NcclComm
from phalanx.kernels.collective import allreduce, allreduce_norm
from phalanx.kernels.gemm import autotune, gemm_reduce_scatter
from phalanx.kernels.gemm.linear import linear
from phalanx.kernels.norm import norm
from phalanx.launcher.job import mpirun
from torch import Tensor

ROWS = "1,4,16,32,64,128,256,512,1024"
CALLS = 50
BLOCKS = (16, 32, 64, 128)


def measure(call: timing.Call, host: mpi.MpiComm) -> float:
    """Microseconds of one call on the slowest rank."""
    best = timing.measure([call], CALLS, before=host.barrier)
    return float(host.all_gather(torch.tensor([best])).max())


def versions(
    rows: int, width: int, group: custom_allreduce.CustomAllReduceComm, nccl: NcclComm, search: bool
) -> dict[str, Callable]:
    """The calls compared for x [rows, width]. Values grow without end; times do not depend on them."""
    x, residual = torch.randn(2, rows, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)

    def after(reduce: Callable[[Tensor], Tensor]) -> Any:
        return norm.add_rms_norm(reduce(x), residual, weight, 1e-5)

    found: dict[str, Callable] = {"nccl": partial(nccl.all_reduce, x), "nccl, norm": partial(after, nccl.all_reduce)}
    peers = group.peers
    if peers is None or not allreduce.supports(x, group.size):
        return found
    kinds = {"one-shot": allreduce.one_shot, "two-shot": allreduce.two_shot}
    found |= {name: partial(kind, x, peers) for name, kind in kinds.items()}
    found["chosen, norm"] = partial(after, group.all_reduce)
    whole: tuple[Tensor, Tensor, Tensor, float, allreduce.SymmetricMemory] = (x, residual, weight, 1e-5, peers)
    found["one kernel"] = partial(allreduce_norm.all_reduce_add_norm, *whole)
    normed: dict[str, Callable] = {"two-shot norm": allreduce_norm.two_shot_add_norm}
    if allreduce_norm.supports_one_way_push(x, group.size):
        normed["one-way norm"] = partial(allreduce_norm.one_way_push_add_norm, blocks=peers.blocks)
    if allreduce_norm.supports_push(x, group.size):
        normed["sent norm"] = partial(allreduce_norm.push_add_norm, blocks=peers.blocks, threads=allreduce.MAX_THREADS)
    found |= {name: partial(both, *whole) for name, both in normed.items()}
    if search:
        for blocks in BLOCKS:
            for name, kind in kinds.items():
                for threads in (128, 256, 512):
                    found[f"{name} b{blocks}t{threads}"] = partial(kind, x, peers, blocks, threads)
            for name, both in normed.items():
                for threads in (256, 512, 1024):
                    if threads <= max(width // 8, 256) and blocks <= max(rows, BLOCKS[0]):
                        found[f"{name} b{blocks}t{threads}"] = partial(both, *whole, blocks=blocks, threads=threads)
    return found


def gemms(rows: int, width: int, inputs: list[int], group: custom_allreduce.CustomAllReduceComm) -> dict[str, Callable]:
    """Products of so many inputs each, the sum over the group and the norm, with weights that come from memory."""
    residual = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weights = {
        n: [torch.randn(width, n, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(copies(width * n * 2))]
        for n in inputs
    }
    autotune.tune(
        autotune.TuneRequest(w, [rows], to) for ws in weights.values() for w in ws for to in (None, group.peers)
    )
    group.agree()

    def apart(x: Tensor, turns: Iterator[Tensor]) -> Any:
        return all_reduce_add_norm(group, linear(x, next(turns)), residual, residual[0], 1e-5)

    def fused(x: Tensor, turns: Iterator[Tensor]) -> Any:
        done = group.gemm_all_reduce_add_norm(x, next(turns), residual, residual[0], 1e-5)
        assert done is not None
        return done

    found: dict[str, Callable] = {}
    for n, ws in weights.items():
        x = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
        found[f"{n} inputs, sum, norm"] = partial(apart, x, itertools.cycle(ws))
        if group.peers and gemm_reduce_scatter.supports(rows, ws[0], group.peers):
            found[f"{n} inputs, reduce-scatter, norm"] = partial(fused, x, itertools.cycle(ws))
    return found


def rank_main(asked: argparse.Namespace) -> None:
    host = mpi.join(asked.np)
    torch.cuda.set_device(host.rank)
    torch.set_grad_enabled(False)
    nccl, group = NcclComm(host), custom_allreduce.CustomAllReduceComm(host)
    if group.why and host.rank == 0:
        print(f"NCCL alone: {group.why}", flush=True)
    for rows in map(int, asked.rows.split(",")):
        calls = versions(rows, asked.width, group, nccl, asked.search)
        if asked.inputs:
            calls |= gemms(rows, asked.width, [int(n) for n in asked.inputs.split(",")], group)
        times = {name: round(measure(call, host), 2) for name, call in calls.items() if asked.only in name}
        if host.rank == 0:
            print(f"{rows:5} x {asked.width} " + "   ".join(f"{k} {v}" for k, v in times.items()), flush=True)
            line = dict(what="allreduce", ranks=host.size, rows=rows, width=asked.width, bytes=rows * asked.width * 2)
            about = dict(device=torch.cuda.get_device_name(), date=str(datetime.date.today()))
            if asked.json:
                with open(asked.json, "a") as file:
                    file.write(json.dumps(about | line | times) + "\n")
    mpi.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--inputs", default="", help="of GEMMs, as 2048,7168")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--json", default="", help="append the lines to this file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        try:
            rank_main(asked)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # the others may wait in a kernel: mpirun ends them
        os._exit(0)
    mpi_ = mpirun.find(os.environ)
    command = mpirun.command(mpi_, asked.np, [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--rank"])
    environ = dict(os.environ) | mpirun.environment(mpi_, asked.np, os.environ)
    raise SystemExit(subprocess.run(command, env=environ).returncode)


if __name__ == "__main__":
    main()
