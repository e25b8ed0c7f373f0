"""Linux calls beyond the standard library: parent-death signals, subreapers, pidfds, clearing processes away."""

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
from pathlib import Path

from ...errors import USAGE, FatalError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PIDFD_OPEN = 434  # the system call's number, the same on x86_64 and aarch64
SILENCE = 3.0
PATIENCE = 2.0


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends. It survives exec.

    The parent is the *thread* that forked this process: fork such children from a thread that outlives them. If the
    parent ended before the call, the kernel never sends the signal; hence the check afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def tie_to_parent() -> Callable[[], None]:
    """`die_with` as a preexec_fn for Popen. Call it in the parent."""
    parent = os.getpid()
    return lambda: die_with(parent)


def adopt_orphans() -> None:
    """Become the subreaper: orphaned descendants become children of this process, so `reap` finds them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises FatalError where the kernel lacks pidfds.

    Pythons built against old headers, such as many of conda and uv, lack os.pidfd_open even on new kernels.
    """
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else _pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):  # EPERM: a container's seccomp filter
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
    """The direct children of a process, by default of this one, adopted ones included."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{parent}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def text_of(path: Path) -> str:
    """What a file of /proc or /sys says; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def say(text: str) -> None:
    """Print one line to the user, on stderr, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"phalanx: {text}", file=sys.stderr, flush=True)


def let_another_speak() -> None:
    """Wait before a rank exits silently: its exit may end the rank that is about to print the reason."""
    time.sleep(SILENCE)


def kill_group(pid: int, number: int) -> None:
    """Signal a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def ignore(signals: Iterable[int]) -> None:
    for number in signals:
        signal.signal(number, signal.SIG_IGN)


def write(fd: int, data: bytes) -> None:
    """Write all of `data`. Drops what cannot be written: a reader that has gone or a full disk must not end a job."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


def reap(spared: set[int]) -> None:
    """Kill all descendants but `spared`, until none is left or PATIENCE seconds are over. Needs `adopt_orphans`."""
    deadline = time.monotonic() + PATIENCE
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
