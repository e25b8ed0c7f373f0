"""Processes as /proc shows them: what a job has started, what of it still runs, and its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

SHARED = Path("/dev/shm")


class Process(NamedTuple):
    parent: int
    born: int  # clock ticks since boot: with the pid an identity, as pids are given away again and exec changes `line`
    line: str


def table() -> dict[int, Process]:
    """Everything that runs; a zombie has ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(") ")[2].split()
                if stat[0] != "Z":
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found[int(entry.name)] = Process(int(stat[1]), int(stat[19]), line)
    return found


def tree(pid: int) -> dict[int, str]:
    """All living descendants of a process and itself, with their command lines."""
    running = table()
    return {p: running[p].line for p in _family(pid, running)}


def _family(pid: int, running: dict[int, Process]) -> list[int]:
    found = {pid} & running.keys()
    while more := {p for p, one in running.items() if one.parent in found} - found:
        found |= more
    return sorted(found)


def gone(pids: Iterable[int], seconds: float = 10) -> bool:
    """Whether all of these end within the time."""
    pids = set(pids)
    return not wait(lambda: pids & table().keys(), seconds)


def wait(left: Callable[[], object], seconds: float):
    """The processes left, once there are none or the time is over."""
    deadline = time.monotonic() + seconds
    while (rest := left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return rest


def mapped(pids: Iterable[int]) -> set[Path]:
    """The shared memory that these processes have."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if line.find(f" {SHARED}/") > 0:
                    found.add(Path(line[line.index("/") :]))
    return found


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL, and remove what nobody can remove then: Open MPI's shared memory, and its mpirun's directory."""
    pids, running = list(pids), table()
    family = [child for pid in pids for child in _family(pid, running)]  # mpirun dies with the launcher
    left = mapped(family) | {Path(tempfile.gettempdir()) / f"ompi.{pid}" for pid in family}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in left:
        remove(path)


class Started:
    """Processes that the job of a process was seen to have, also after its parents have ended; nothing of it may stay.

    The process has to be the first of its process group.
    """

    def __init__(self, pid: int):
        self._pid = pid
        self._seen: dict[int, int] = {}

    def look(self) -> dict[int, str]:
        """The job as it is now, as tree() gives it; to be called as often as something may have been started."""
        running = table()
        family = _family(self._pid, running)
        self._seen |= {pid: running[pid].born for pid in family}
        return {pid: running[pid].line for pid in family}

    def living(self) -> dict[int, str]:
        """Processes that still run of all that were seen."""
        running = table()
        return {pid: running[pid].line for pid, born in self._seen.items()
                if pid in running and running[pid].born == born}  # fmt: skip

    def left(self, seconds: float = 10) -> dict[int, str]:
        """living() after waiting for it to end."""
        return wait(self.living, seconds)

    def kill(self) -> None:
        self.look()
        kill(self.living())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
