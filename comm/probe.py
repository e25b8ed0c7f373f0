"""Measures communication between the ranks of a job, for `phalanx doctor`: `python -m phalanx.comm.probe` per rank.

The variable PHALANX_PROBE holds JSON: `rank` and `size` as the launcher announced them; `facts`, a text of this rank
that is passed on unread; `device`, the GPU's index, -1 for the CPU; `born`, the start time in seconds since the epoch;
`result`, the file that rank 0 writes; `seconds`, the time limit for joining and measuring.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from typing import Any

import torch

from .. import errors
from . import mpi
from .base import Comm
from .broadcast import gather_bytes

ENV = "PHALANX_PROBE"
SIZES = (16 << 10, 1 << 20, 64 << 20)  # bytes: all-reduces of a decode step, of a prefill step, and bound by bandwidth
PATIENCE = 1.0  # seconds for one size
EXIT_PATIENCE = 10  # seconds for exit handlers


def main() -> int:
    ask = json.loads(os.environ.pop(ENV))
    rank = int(ask["rank"])
    ask["phase"] = "connect over MPI"
    alarm = threading.Timer(ask["seconds"], _too_late, (ask,))
    alarm.daemon = True
    alarm.start()
    found: dict[str, Any] = {"error": ""}
    try:
        world = mpi.join(ask["size"])
        found |= {"library": mpi.library(), "joined_s": time.time() - ask["born"]}
        found |= _measure(world, ask)
    except Exception as error:  # rank 0 reports it
        found["error"] = str(error)
        if rank:
            # Rank 0 has the same error or is stuck in a collective: its own report or alarm counts.
            time.sleep(ask["seconds"])
            os._exit(errors.RANK_FAILED)
    alarm.cancel()
    _report(ask, found)
    if not found["error"]:
        mpi.leave()
    return 0


def _measure(world: mpi.MpiComm, ask: dict[str, Any]) -> dict[str, Any]:
    ask["phase"] = "exchange what they know"
    facts = [text.decode() for text in gather_bytes(world, ask["facts"].encode())]
    hosts = [name.decode() for name in gather_bytes(world, socket.gethostname().encode())]
    ask["phase"] = "compare clocks"
    world.barrier()
    found: dict[str, Any] = {"ranks": facts, "hosts": hosts, "clocks": clocks(world, hosts)}
    ask["phase"] = "measure an all-reduce over MPI"
    found["all_reduce"] = all_reduce(world, torch.device("cpu"))
    ask["phase"] = "measure an all-reduce over NCCL"
    gpus = [int(text) for text in gather_bytes(world, str(ask["device"]).encode())]
    found["gpu"] = _on_gpus(world, ask["device"]) if all(index >= 0 for index in gpus) else {}
    return found


def all_reduce(comm: Comm, device: torch.device) -> list[dict[str, float]]:
    """Median us of each size, and GB/s as nccl-tests' bus bandwidth: 2 (n - 1) / n of the bytes in the time.

    Stops before a size of which, by the size before, one call would take too long: links between hosts may be a
    thousand times slower than links within one.
    """
    rows: list[dict[str, float]] = []
    for size in SIZES if comm.size > 1 else ():
        expected = rows[-1]["us"] * 1e-6 * size / rows[-1]["bytes"] if rows else 0.0
        if not _agree(comm, expected < PATIENCE, device):
            break
        seconds = statistics.median(_timed(comm, torch.zeros(size // 4, device=device), device))
        moved = size * 2 * (comm.size - 1) / comm.size
        rows.append({"bytes": size, "us": seconds * 1e6, "gbps": moved / seconds / 1e9})
    return rows


def _agree(comm: Comm, mine: bool, device: torch.device) -> bool:
    """Rank 0's answer, on every rank."""
    answer = torch.tensor([int(mine)], dtype=torch.int64, device=device)
    return bool(comm.broadcast(answer, 0).item())


def _timed(comm: Comm, x: torch.Tensor, device: torch.device) -> list[float]:
    """Seconds of each call after a warm-up call. Rank 0's clock decides how many calls all ranks make."""
    times: list[float] = []
    deadline = time.monotonic() + PATIENCE
    while len(times) < 2 or (len(times) < 200 and _agree(comm, time.monotonic() < deadline, device)):
        start = time.perf_counter()
        comm.all_reduce(x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]


def clocks(world: mpi.MpiComm, hosts: list[str]) -> list[dict[str, Any]]:
    """How far each other host's clock is ahead of rank 0's, by the fastest of 20 exchanges with its first rank."""
    found = []
    for peer in sorted({hosts.index(host) for host in hosts} - {hosts.index(hosts[0])}):
        times = torch.zeros(1, dtype=torch.float64)
        best = (float("inf"), 0.0)
        for _ in range(20):
            if world.rank == 0:
                sent = time.time()
                world.send(times, peer)
                world.recv(times, peer)
                back = time.time()
                best = min(best, (back - sent, times.item() - (sent + back) / 2))
            elif world.rank == peer:
                world.recv(times, 0)
                times.fill_(time.time())
                world.send(times, 0)
        found.append({"host": hosts[peer], "ahead_s": best[1], "round_trip_s": best[0]})
    return found


def _on_gpus(world: mpi.MpiComm, index: int) -> dict[str, Any]:
    """Times the all-reduce between the ranks' GPUs over NCCL. `problem`: the reason why it was not possible."""
    problem = ""
    if not torch.cuda.is_available():
        problem = f"PyTorch {torch.__version__} sees no GPU: install it for CUDA (`make install TORCH=cuda`)"
    elif world.size > 1:
        try:
            from cupy.cuda import nccl  # noqa: F401
        except ImportError as error:
            problem = f"several GPUs need CuPy with NCCL ({error}): `pip install phalanx[gpu]`"
    problems = [text.decode() for text in gather_bytes(world, problem.encode())]
    if any(problems):
        return {"problem": next(text for text in problems if text)}
    device = torch.device("cuda", index if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    from .nccl import NcclComm

    return {"problem": "", "all_reduce": all_reduce(NcclComm(world), device), "torch": torch.__version__}


def _report(ask: dict[str, Any], found: dict[str, Any]) -> None:
    if int(ask["rank"]) == 0:
        with open(ask["result"], "w", encoding="utf-8") as file:
            json.dump(found, file)


def _too_late(ask: dict[str, Any]) -> None:
    """The time is over and a rank is stuck in MPI: rank 0 writes the error, and all ranks exit."""
    if int(ask["rank"]):
        time.sleep(1.0)  # let rank 0 write first: the end of any rank may end the job
        os._exit(errors.RANK_STUCK)
    _report(ask, {"error": f"the ranks did not {ask['phase']} within {ask['seconds']:g} s"})
    os._exit(errors.RANK_STUCK)


if __name__ == "__main__":
    code = main()
    # MPICH signs off from mpirun in an exit handler; without it mpirun kills the job. Other exit handlers may hang.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_PATIENCE)
    sys.exit(code)
