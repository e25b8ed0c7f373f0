"""The file by which `phalanx chat` and `phalanx gateway` find a running server: one for each job, in the user's state
directory.

That directory is usually in the home that login and compute nodes share. The file holds the API key, so it is for this
user only. The server process writes it, keeps its state and load current (`registration.py`), and removes it at its
end; `over` recognises what a killed one left. A
file of another user, or in a directory that others control, could lead `phalanx chat` and `phalanx gateway`, with
prompts and keys, to a server of theirs: such files are passed over.
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
STILL = 60.0  # seconds since the last heartbeat of a job that may be alive


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
    models: list[str] = []  # all names that clients have for its models
    state: str = "ready"  # or "starting", "draining": whether it takes requests
    beat: float = 0.0  # Unix time at which the file was last written; 0: by a version that writes it once
    load: int = 0  # sequences that run or wait
    predecessor: str = ""  # the name of the file of the job that has submitted this one
    has_files: bool = False  # it has those of --file-store, for which its successor waits


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
    """Why others control what is there, or "". Below a directory for everybody each directory on the way has to be this
    user's and closed to others. Elsewhere the directory itself may be open to a group where it is this user's, or has
    the sticky bit: no other user can put a file of this user's there, and `_read` takes no other.
    """
    below = _below_shared(place)
    if not below:
        try:
            status = place.stat()
        except OSError:
            return ""
        open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        return f"others may write to {place}" if open_to_others and status.st_uid != os.getuid() else ""
    for one in below:
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


def beats(job: RegisteredServer) -> bool:
    """Whether the job's heartbeat is so recent that it runs, however its host's clock and a slow file system differ."""
    return abs(time.time() - job.beat) < STILL  # a clock that was set back leaves heartbeats in the future


def over(job: RegisteredServer, host: str) -> bool:
    """Whether the job is certainly over, seen from `host`. Of another host's processes only the clock can tell."""
    # Clocks differ, a batch system grants a few minutes, and the end may have been moved while the job ran.
    if job.end and time.time() > job.end + 600 and not beats(job):
        return True
    return job.host == host and job.pids == namespace() and start_of(job.pid) != job.start


def _read(path: Path) -> bytes:
    """The file. Raises PermissionError where another user could have written it."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (0, os.getuid()):
            raise PermissionError(errno.EPERM, f"it belongs to another user, whose id is {status.st_uid}")
        if status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"others may write it (mode {stat.S_IMODE(status.st_mode):o})")
        return file.read()


def read(path: Path) -> RegisteredServer:
    """The job of a file. Raises OSError, and ValueError for a file of another version or that others may write."""
    return msgspec.json.decode(_read(path), type=RegisteredServer)


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
            job = read(path)
        except PermissionError as error:
            _warn(f"the file of a running server {path} is passed over: {error.strerror}")
            continue
        except (OSError, ValueError):  # gone meanwhile, or of another version
            continue
        if over(job, host):
            remove(path)
        else:
            found[path.stem] = job
    return dict(sorted(found.items(), key=lambda one: one[1].since))
