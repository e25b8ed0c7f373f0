"""Reads a batch system's allocation from the environment: hosts, and ranks per host. Slurm, PBS, LSF and Flux.

Sources: the manual pages of sbatch ("OUTPUT ENVIRONMENT VARIABLES") and scontrol (host lists), of qsub (PBS_NODEFILE),
of bsub (LSB_DJOB_HOSTFILE, LSB_DJOB_RANKFILE, LSB_HOSTS, LSB_MCPU_HOSTS), and flux-environment(7), flux-hostlist(1).
Only this file and mpi_env.py read such variables.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping

import msgspec

from ...errors import USAGE, FatalError

FLUX_PATIENCE = 30.0  # seconds
Slots = list[tuple[str, int]]  # hosts in the allocation's order with their slots; the first one runs rank 0


def hosts_words(count: int) -> str:
    return "1 host" if count == 1 else f"{count} hosts"


class Allocation(msgspec.Struct, frozen=True):
    hosts: Slots
    source: str  # the variables that were read, for messages
    job: str  # the batch system's name for it, "" if unknown
    gpus: int = 0  # of this node; 0: the batch system does not say

    @property
    def slots(self) -> int:
        return sum(count for _, count in self.hosts)


def find(environ: Mapping[str, str], slots: int = 0) -> Allocation:
    """The current allocation. slots: of each host, in place of the batch system's; 0: keep those.

    Raises FatalError outside an allocation, and where the variables make no sense.
    """
    for found in (_slurm(environ, slots), _pbs(environ), _lsf(environ), _flux(environ)):
        if found is not None:
            hosts = [(host, slots or count) for host, count in found.hosts]
            return msgspec.structs.replace(found, hosts=hosts)
    raise FatalError(
        "this is no allocation: neither SLURM_JOB_NODELIST (Slurm) nor PBS_NODEFILE (PBS) nor LSB_DJOB_HOSTFILE, "
        "LSB_HOSTS or LSB_MCPU_HOSTS (LSF) nor FLUX_URI (Flux) is set; run it inside a job (salloc, qsub -I, bsub -Is, "
        "flux alloc, or a batch script), "
        "or write the file by hand as hostfiles/hostfile shows",
        USAGE,
    )


def expand(text: str) -> list[str]:
    """Expand Slurm's `gpu[01-03,07],login1,r[1-2]n[1-2]` to names. Numbers are as wide as the range's start."""
    names: list[str] = []
    for group in _split(text):
        pieces = re.split(r"\[([^]]*)\]", group)  # text, range, text, range, …, text
        found = [pieces[0]]
        for ranges, rest in zip(pieces[1::2], pieces[2::2], strict=True):
            found = [name + number + rest for name in found for number in _numbers(ranges, text)]
        if any("[" in name or "]" in name for name in found):
            raise FatalError(f"the host list {text!r} has a bracket without its other half", USAGE)
        names += found
    return names


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    return [part for part in re.split(r",(?![^[]*\])", text.strip()) if part]


def _numbers(ranges: str, whole: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise FatalError(f"the host list {whole!r} has a range that cannot be read: {part!r}", USAGE)
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return found


def counts(text: str) -> list[int]:
    """Slurm's `2(x3),1` as [2, 2, 2, 1]."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise FatalError(f"the task counts {text!r} cannot be read: `2(x3),1` is the form that Slurm writes", USAGE)
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _slurm(environ: Mapping[str, str], wanted: int) -> Allocation | None:
    name = next((one for one in ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(one)), "")
    if not name:
        return None
    hosts = expand(environ[name])
    each = environ.get("SLURM_NTASKS_PER_NODE", "").partition("(")[0]
    tasks = environ.get("SLURM_TASKS_PER_NODE", "")
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    job, here = environ.get("SLURM_JOB_ID", ""), int(gpus) if gpus.isdigit() else 0
    if each.isdigit():
        return Allocation([(host, int(each)) for host in hosts], f"{name} and SLURM_NTASKS_PER_NODE", job, here)
    if wanted or not tasks:
        return Allocation([(host, 1) for host in hosts], name, job, here)
    slots = counts(tasks)
    if len(slots) != len(hosts):
        raise FatalError(
            f"{name} {environ[name]!r} names {hosts_words(len(hosts))}, but SLURM_TASKS_PER_NODE {tasks!r} counts "
            f"tasks for {len(slots)}; --slots N says how many ranks each host takes",
            USAGE,
        )
    return Allocation(list(zip(hosts, slots, strict=True)), f"{name} and SLURM_TASKS_PER_NODE", job, here)


def _pbs(environ: Mapping[str, str]) -> Allocation | None:
    if not environ.get("PBS_NODEFILE"):
        return None
    return Allocation(_counted(_lines("PBS_NODEFILE", environ)), "PBS_NODEFILE", environ.get("PBS_JOBID", ""))


def _lsf(environ: Mapping[str, str]) -> Allocation | None:
    job = environ.get("LSB_JOBID", "")
    for name in ("LSB_DJOB_HOSTFILE", "LSB_DJOB_RANKFILE"):
        if environ.get(name):
            return Allocation(_counted(_lines(name, environ)), name, job)
    if text := environ.get("LSB_MCPU_HOSTS", "").strip():
        words = text.split()
        if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
            raise FatalError(
                f"LSB_MCPU_HOSTS {text!r} cannot be read: `host1 4 host2 4` is the form that LSF writes", USAGE
            )
        hosts = [(host, int(count)) for host, count in zip(words[::2], words[1::2], strict=True)]
        return Allocation(hosts, "LSB_MCPU_HOSTS", job)
    if text := environ.get("LSB_HOSTS", "").strip():
        return Allocation(_counted(text.split()), "LSB_HOSTS", job)
    return None


def _flux(environ: Mapping[str, str]) -> Allocation | None:
    """Flux's commands tell what other systems have in variables. They say no number of tasks."""
    if not environ.get("FLUX_URI"):
        return None
    words = ["flux", "hostlist", "--local"]
    try:
        done = subprocess.run(
            words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FLUX_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FatalError(f"{' '.join(words)}: {error}", USAGE) from None
    hosts = expand(done.stdout)
    if done.returncode or not hosts:
        raise FatalError(f"{' '.join(words)}: {done.stderr.strip()[-300:] or 'it names no host'}", USAGE)
    return Allocation([(host, 1) for host in hosts], " ".join(words), environ.get("FLUX_JOB_ID", ""))


def _lines(name: str, environ: Mapping[str, str]) -> list[str]:
    try:
        with open(environ[name], encoding="utf-8") as file:
            found = [line.split()[0] for line in file if line.strip() and not line.startswith("#")]
    except OSError as error:
        raise FatalError(f"{name} {environ[name]}: {error.strerror}", USAGE) from None
    if not found:
        raise FatalError(f"{name} {environ[name]} is empty", USAGE)
    return found


def _counted(names: Iterable[str]) -> Slots:
    """Slots from a list that names a host once for each of its ranks, in any order."""
    slots: dict[str, int] = {}
    for name in names:
        slots[name] = slots.get(name, 0) + 1
    return list(slots.items())


def hostfile(hosts: Slots, kind: str) -> str:
    """The text of a hostfile for mpirun. kind: openmpi or mpich."""
    return "".join(f"{host} slots={count}\n" if kind == "openmpi" else f"{host}:{count}\n" for host, count in hosts)
