"""What the launcher needs of Linux beyond the standard library: tying processes to each other's lives."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable

from ...errors import USAGE, FatalError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PIDFD_OPEN = 434  # the system call's number, the same on x86_64 and aarch64
SILENCE = 3.0


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with(parent: int, death_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send `death_signal` to this process when its parent is gone; survives exec.

    The parent is the *thread* that forked us: start such children from a thread that lives as long as they may.
    A parent that was gone before the call never sends it, hence the second look.
    """
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


def tie_to_parent(death_signal: int = signal.SIGKILL) -> Callable[[], None]:
    """The same as Popen's preexec_fn, called in the parent."""
    parent = os.getpid()
    return lambda: die_with(parent, death_signal)


def adopt_orphans() -> None:
    """Descendants whose parent dies become our children, so that nothing of a job escapes the final clearing."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises Stop where the kernel has none.

    Pythons that were built against old headers, as many of conda and uv are, lack os.pidfd_open on new kernels too.
    """
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else _pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):  # a container's filter says EPERM of calls it does not know
            raise
        raise FatalError(
            f"Linux 5.3 or newer is needed, with the system call pidfd_open ({error.strerror}): this is Linux "
            f"{platform.release()} with Python {platform.python_version()}",
            USAGE,
        ) from None


def _pidfd_open(pid: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.argtypes, libc.syscall.restype = (ctypes.c_long, ctypes.c_long, ctypes.c_long), ctypes.c_long
    fd = libc.syscall(_PIDFD_OPEN, pid, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def children(parent: int | str = "self") -> list[int]:
    """Direct children of a process, this one if none is named, adopted ones included."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{parent}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def say(text: str) -> None:
    """One line to the user."""
    print(f"phalanx: {text}", file=sys.stderr, flush=True)


def let_another_speak() -> None:
    """Before a rank ends in silence: its end would end the one that is about to say why."""
    time.sleep(SILENCE)


def kill_group(pid: int, number: int) -> None:
    """Signal a process group; a group that is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def ignore(signals: Iterable[int]) -> None:
    for number in signals:
        signal.signal(number, signal.SIG_IGN)


def write(fd: int, data: bytes) -> None:
    """All of `data`; a reader that is gone is no reason to end."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while data:
            data = data[os.write(fd, data) :]


def reap(spared: set[int], patience: float = 2.0) -> None:
    """Kill every child but `spared`, and theirs, which become ours, until none is left."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        left = [pid for pid in children() if pid not in spared]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
