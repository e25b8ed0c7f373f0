"""`phalanx hostfile`: the current allocation of Slurm, PBS, LSF or Flux as a file for mpirun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec

from ... import errors
from ...logs import say
from ...rank.options import flag
from ..job import allocation, mpirun
from ..options import option_sources
from ..options.help import shown

HELP = "write the current Slurm, PBS, LSF or Flux allocation as a file for mpirun"
USAGE = """phalanx hostfile [options]: write the hosts of the current Slurm, PBS, LSF or Flux allocation for mpirun

  phalanx hostfile --slots 8 -o hosts
  mpirun -np 16 -hostfile hosts --bind-to none --map-by slot phalanx serve DIR --d 0,1,2,3,4,5,6,7
"""
_GROUP = "Hostfile"


class HostfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    slots: Annotated[
        int,
        flag("--slots", "--slots-per-node", group=_GROUP, metavar="N", low=0,
             help="ranks on each host, one per GPU; 0: the allocation's tasks"),
    ] = 0  # fmt: skip
    mpi: Annotated[
        str,
        flag("--mpi", group=_GROUP, choices=("auto", "openmpi", "mpich"),
             spellings={"hydra": "mpich", "intel": "mpich"},
             help="whose mpirun reads it; auto: the one of the MPI that Python loads"),
    ] = "auto"  # fmt: skip
    output: Annotated[str, flag("--output", "-o", group=_GROUP, metavar="FILE", help="instead of the terminal")] = ""


def main(argv: Sequence[str]) -> int:
    chosen = option_sources.read(HostfileOptions, argv, os.environ)
    if shown(chosen, USAGE):
        return 0
    for note in chosen.notes:
        say(note)
    options = chosen.options
    found = allocation.find(os.environ, options.slots)
    if not options.slots and found.gpus and any(count != found.gpus for _, count in found.hosts):
        say(f"this node has {found.gpus} GPUs, but slots differ from that; --slots {found.gpus} gives each GPU a rank")
    kind = _kind() if options.mpi == "auto" else options.mpi
    hosts = allocation.hosts_words(len(found.hosts))
    job = f" of job {found.job}" if found.job else ""
    text = f"# {hosts}, {found.slots} slots{job}, from {found.source}\n" + allocation.hostfile(found.hosts, kind)
    if not options.output:
        sys.stdout.write(text)
        return 0
    try:
        with open(options.output, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise errors.FatalError(f"--output {options.output}: {error.strerror}", errors.USAGE) from None
    say(f"{options.output}: {hosts}; start with: {start_line(kind, found.slots, options.output)} phalanx serve …")
    return 0


def start_line(kind: str, ranks: int, file: str) -> str:
    """The words before `phalanx serve` that start ranks on the hosts of a file."""
    if kind == "mpich":
        return f"mpirun -np {ranks} -f {file}"
    return f"mpirun -np {ranks} -hostfile {file} --bind-to none --map-by slot"


def _kind() -> str:
    try:
        return mpirun.find(os.environ).kind
    except errors.FatalError:
        say("no MPI was found here, so the file is written for Open MPI; --mpi mpich writes MPICH's form")
        return "openmpi"
