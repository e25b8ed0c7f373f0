"""A rank of the doctor's: tells its facts, binds itself as a rank would, and becomes `phalanx.comm.probe`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import NoReturn

import msgspec
import psutil

from .... import child_python
from ....errors import FatalError
from ....rank.options import Options
from ...job import binding, linux, mpi_env, rank_bootstrap
from ...job.mpi_env import RankPlacement
from . import facts

REQUEST_ENV = "PHALANX_DOCTOR"
PROBE_ENV = "PHALANX_PROBE"  # comm/probe.py says what it holds
PROBE = ["-m", "phalanx.comm.probe"]


class ProbeRequest(msgspec.Struct, frozen=True):
    """The doctor's message to its ranks."""

    result: str  # rank 0's file
    device: str = "auto"
    devices: tuple[int, ...] = ()
    seconds: float = 30.0
    own: bool = False  # each rank may have been given a GPU of its own: launcher/job/rank_bootstrap.py


def prepare(request: ProbeRequest, place: RankPlacement) -> dict[str, str]:
    """Bind this process as a rank would be; the environment for the probe."""
    problem, gpu = "", -1
    try:
        gpu = rank_bootstrap.device_index(Options(device=request.device, devices=request.devices), place, request.own)
    except FatalError as stop:
        problem = str(stop)
    share = binding.choose(place, gpu, os.environ)
    known = facts.collect(place, gpu, share)  # with the binding that was inherited
    environ = dict(os.environ)
    known = msgspec.structs.replace(known, bound=binding.apply(share, environ))
    ask = {
        "rank": place.rank,
        "size": place.size,
        "facts": json.dumps({"problem": problem} | msgspec.structs.asdict(known), default=msgspec.to_builtins),
        "device": gpu,
        "born": psutil.Process().create_time(),
        "result": request.result,
        "seconds": request.seconds,
    }
    return environ | {PROBE_ENV: json.dumps(ask)}


def exec_probe(request: ProbeRequest, place: RankPlacement) -> NoReturn:
    """Replace this process by the probe."""
    os.execve(sys.executable, child_python.command(*PROBE), prepare(request, place))


def run(request: ProbeRequest, place: RankPlacement) -> None:
    """Rank 0 under a user's mpirun: the probe is a child, as this process has the report to write afterwards."""
    subprocess.run(
        child_python.command(*PROBE),
        env=prepare(request, place),
        close_fds=False,  # MPICH's mpirun speaks to its ranks over a descriptor
        preexec_fn=linux.tie_to_parent(),
    )


def main() -> NoReturn:
    """Started by the doctor's mpirun: `python -m phalanx.launcher.commands.doctor.rank_probe`."""
    linux.die_with(os.getppid())
    linux.ignore((signal.SIGUSR1, signal.SIGUSR2))
    request = msgspec.json.decode(os.environ.pop(REQUEST_ENV), type=ProbeRequest)
    exec_probe(request, mpi_env.rank_placement(os.environ) or RankPlacement(0, 1, 0, 1, "phalanx"))


if __name__ == "__main__":
    main()
