"""Linux calls beyond the standard library: parent-death signals, subreapers, pidfds, clearing processes away."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ...errors import USAGE, FatalError
from ...linux_calls import LINUX, end_with_parent, pidfd_open, prctl

_PR_SET_CHILD_SUBREAPER = 36
SILENCE = 3.0
PATIENCE = 2.0


def die_with(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends. It survives exec.

    The parent is the *thread* that forked this process: fork such children from a thread that outlives them. If the
    parent ended before the call, the kernel never sends the signal; hence the check afterwards.
    """
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def tie_to_parent() -> Callable[[], None]:
    """`die_with` as a preexec_fn for Popen. Call it in the parent."""
    parent = os.getpid()
    return lambda: die_with(parent)


def adopt_orphans() -> None:
    """Become the subreaper: orphaned descendants become children of this process, so `reap` finds them. Not on Macs."""
    if LINUX:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises FatalError where the kernel lacks pidfds."""
    try:
        return pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):  # EPERM: a container's seccomp filter
            raise
        raise FatalError(
            f"Linux 5.3 or newer is needed, with the system call pidfd_open ({error.strerror}): this is Linux "
            f"{platform.release()} with Python {platform.python_version()}",
            USAGE,
        ) from None


def children(parent: int | str = "self") -> list[int]:
    """The direct children of a process, by default of this one, adopted ones included."""
    found: list[int] = []
    if not LINUX:
        import psutil

        pid = os.getpid() if parent == "self" else int(parent)
        return [one.pid for one in psutil.Process(pid).children()]
    for task in os.listdir(f"/proc/{parent}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def text_of(path: Path) -> str:
    """The text of a file of /proc or /sys; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


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
