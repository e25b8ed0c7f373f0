"""Linux calls that are not in every Python: many of conda and uv were built against headers that lack them. And what
stands for them on other systems, which are Macs. No torch, and psutil only where a call needs it: kernels may be
compiled before it is installed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

LINUX = sys.platform == "linux"
# Messages that stay whole between processes; Macs have no SOCK_SEQPACKET for Unix sockets.
PACKETS = socket.SOCK_SEQPACKET if LINUX else socket.SOCK_DGRAM
SYS, PROC = Path("/sys"), Path("/proc")
_PR_SET_PDEATHSIG = 1
_PIDFD_OPEN = 434  # the number of a system call, the same on x86_64 and aarch64
_MFD_CLOEXEC = 1


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    _checked(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0))


def end_with_parent(signum: int) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends; 0: none. It survives exec.

    The signal never comes where that has ended already, nor on Macs: there, processes find that their sockets are shut.
    """
    if LINUX:
        prctl(_PR_SET_PDEATHSIG, signum)


def pidfd_open(pid: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises OSError."""
    if not LINUX:
        return _watched(pid)
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else _syscall(_PIDFD_OPEN, pid, 0)


def _watched(pid: int) -> int:
    """pidfd_open by a thread that looks ten times a second. Raises ProcessLookupError."""
    import psutil

    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(str(error)) from None
    read, write = os.pipe()

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.1)
        os.close(write)

    threading.Thread(target=watch, daemon=True, name=f"end of {pid}").start()
    return read


def processors() -> set[int]:
    """The processors that this process may use. Macs bind none."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def bind(cpus: Iterable[int]) -> None:
    """Raises OSError."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def peer(one: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket."""
    if LINUX:
        pid, uid, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid
    # SOL_LOCAL, and LOCAL_PEERPID and LOCAL_PEERCRED of sys/un.h; of struct xucred the version and the user come first.
    (pid,) = struct.unpack("i", one.getsockopt(0, 2, 4))
    _, uid = struct.unpack_from("II", one.getsockopt(0, 1, 76))
    return pid, uid


def memory_file(name: str, size: int = 0) -> int:
    """The descriptor of a file of zeros in memory, which other processes get by descriptor only. Raises OSError."""
    if not LINUX:
        with tempfile.TemporaryFile() as file:  # without a name, on a disk
            fd = os.dup(file.fileno())
    elif hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
    else:
        fd = _checked(ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC))
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def gpu_memory_nodes() -> dict[int, dict[str, int]]:
    """NUMA nodes that are GPUs' memory, with the bytes of their meminfo. Drivers of Grace hosts make such nodes, which
    have no cores; elsewhere nodes without cores are memory of the host's own."""
    found: dict[int, dict[str, int]] = {}
    if platform.machine() != "aarch64" or not any((PROC / "driver/nvidia/gpus").glob("*")):
        return found
    for folder in (SYS / "devices/system/node").glob("node[0-9]*"):
        lines = [line.split() for line in (folder / "meminfo").read_text().splitlines()]  # Node 4 MemTotal: 100 kB
        sizes = {line[2].rstrip(":"): int(line[3]) << 10 for line in lines if len(line) > 3}
        if not (folder / "cpulist").read_text().strip() and sizes.get("MemTotal"):
            found[int(folder.name[4:])] = sizes
    return dict(sorted(found.items()))


def host_memory() -> tuple[int, int]:
    """Bytes of this host's memory in all, and available, without GPUs' own, which Linux counts where that is a node."""
    import psutil

    host, others = psutil.virtual_memory(), gpu_memory_nodes().values()
    free = sum(one.get("MemFree", 0) + one.get("Inactive(file)", 0) for one in others)
    return host.total - sum(one["MemTotal"] for one in others), max(0, host.available - free)


def _syscall(*values: int) -> int:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    return _checked(syscall(*map(ctypes.c_long, values)))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
