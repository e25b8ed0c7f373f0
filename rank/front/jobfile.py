"""The file by which `phalanx chat` finds a running server: one for each job, in the user's state directory.

That directory is usually in the home that login and compute nodes share. The file holds the API key, so it is for this
user only. The front writes it and removes it at its end; what a killed one left is recognised by `over`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import msgspec


class JobFile(msgspec.Struct):
    """A running server, as somebody on another host needs it."""

    url: str  # http://127.0.0.1:2000, without /v1; or unix:///PATH
    host: str
    model: str  # the name that clients see
    pid: int  # of the front
    start: int = 0  # of that process, in clock ticks after the boot; a later process may have the same pid
    pids: int = 0  # the namespace that counts it: a container has its own
    since: float = 0.0  # Unix time
    key: str = ""
    batch: str = ""  # the batch system's name for the job
    end: float = 0.0  # Unix time at which the batch system ends it; 0: not known


def directory(environ: os._Environ[str] | dict[str, str] = os.environ) -> Path:
    """$XDG_STATE_HOME/phalanx/jobs, by default under ~/.local/state; of a user without a home, in /tmp."""
    state, home = environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~")
    if not os.path.isabs(state):
        state = f"{home}/.local/state" if os.path.isabs(home) else f"{tempfile.gettempdir()}/{os.getuid()}"
    return Path(state) / "phalanx" / "jobs"


def start_of(pid: int) -> int:
    """When a process of this host started, in clock ticks after the boot; 0 where there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if status[0] == "Z" else int(status[19])  # proc(5): field 22; those before the name are gone


def namespace() -> int:
    """Which processes this one's numbers are of."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def write(path: Path, job: JobFile) -> None:
    """At once and for this user only. Raises OSError where the directory cannot be written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(job) + b"\n")
    part.rename(path)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def over(job: JobFile, host: str) -> bool:
    """Whether the job is certainly over, seen from `host`. Of another host's processes only the clock can tell."""
    if job.end and time.time() > job.end + 600:  # clocks differ, and a batch system grants a few minutes
        return True
    return job.host == host and job.pids == namespace() and start_of(job.pid) != job.start


def running(place: Path, host: str) -> dict[str, JobFile]:
    """The jobs of this user by the names of their files, the oldest first. Files of jobs that are over are removed."""
    found: dict[str, JobFile] = {}
    try:
        paths = sorted(place.glob("*.json"))
    except OSError:
        return {}
    for path in paths:
        try:
            job = msgspec.json.decode(path.read_bytes(), type=JobFile)
        except (OSError, ValueError):  # gone meanwhile, or of another version
            continue
        if over(job, host):
            remove(path)
        else:
            found[path.stem] = job
    return dict(sorted(found.items(), key=lambda one: one[1].since))
