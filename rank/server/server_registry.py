"""The file by which `phalanx chat` finds a running server: one for each job, in the user's state directory.

That directory is usually in the home that login and compute nodes share. The file holds the API key, so it is for this
user only. The server process writes it and removes it at its end; `over` recognises what a killed one left. In /tmp,
where everybody may write, somebody else may have made the directory first, with a file that leads `phalanx chat`, and
what is said there, to a server of theirs: `insecure_reason` tells.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tempfile
import time
from functools import cache
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


class RegisteredServer(msgspec.Struct):
    """A running server, as somebody on another host needs it."""

    url: str  # http://127.0.0.1:2000 or https://…, without /v1; or unix:///PATH
    host: str
    model: str  # the name that clients see
    pid: int  # of the server process
    start: int = 0  # of that process, in clock ticks after the boot; a later process may have the same pid
    pids: int = 0  # the namespace that counts it: a container has its own
    since: float = 0.0  # Unix time
    key: str = ""
    certificate: str = ""  # of TLS, PEM: by which clients know the server
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


def insecure_reason(place: Path) -> str:
    """Why others may have put files there, or "". Only what is below a directory for everybody is looked at."""
    for one in _below_shared(place):
        try:
            status = one.lstat()
        except FileNotFoundError:
            break
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.getuid()):
            return f"{one} is not a directory of yours"
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:  # sticky: it is for everybody, as /tmp is
            return f"others may write to {one}"
    return ""


def _below_shared(place: Path) -> list[Path]:
    """The directories from the first one below /tmp, or what stands for it, down to this one."""
    shared = (Path("/tmp"), Path(tempfile.gettempdir()))
    return [one for one in (*reversed(place.parents), place) if any(root in one.parents for root in shared)]


def make_directory(place: Path) -> None:
    """For this user only. Raises OSError where it cannot be made or written, or is not this user's."""
    for one in (*reversed(place.parents), place):
        if not one.is_dir():
            with contextlib.suppress(FileExistsError):
                one.mkdir(mode=0o700)
    if why := insecure_reason(place):
        raise PermissionError(errno.EPERM, why)
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write(path: Path, job: RegisteredServer) -> None:
    """At once and for this user only. Raises OSError where the directory cannot be written, or is not this user's."""
    make_directory(path.parent)
    part = path.with_suffix(".part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(job) + b"\n")
    part.rename(path)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def over(job: RegisteredServer, host: str) -> bool:
    """Whether the job is certainly over, seen from `host`. Of another host's processes only the clock can tell."""
    if job.end and time.time() > job.end + 600:  # clocks differ, and a batch system grants a few minutes
        return True
    return job.host == host and job.pids == namespace() and start_of(job.pid) != job.start


def _read(path: Path) -> bytes:
    """The file, or nothing where another user has put it into a directory below one for everybody."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        mine = os.fstat(file.fileno()).st_uid == os.getuid()
        return file.read() if mine or not _below_shared(path.parent) else b""


@cache
def _warn(text: str) -> None:
    """Once in a process."""
    log.warning("%s", text)


def running(place: Path, host: str) -> dict[str, RegisteredServer]:
    """The jobs of this user by the names of their files, the oldest first. Files of jobs that are over are removed."""
    found: dict[str, RegisteredServer] = {}
    if why := insecure_reason(place):
        _warn(f"the files of running servers in {place} are passed over: {why}")
        return {}
    try:
        paths = sorted(place.glob("*.json"))
    except OSError:
        return {}
    for path in paths:
        try:
            job = msgspec.json.decode(_read(path), type=RegisteredServer)
        except (OSError, ValueError):  # gone meanwhile, or of another version
            continue
        if over(job, host):
            remove(path)
        else:
            found[path.stem] = job
    return dict(sorted(found.items(), key=lambda one: one[1].since))
