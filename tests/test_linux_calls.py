"""Linux calls, also by Pythons that lack them, as many of conda and uv do, and what stands for them on Macs."""

import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
from phalanx import linux_calls
from phalanx.launcher.job import linux


@pytest.fixture(params=["Python's calls", "the C library's", "a Mac's"], autouse=True)
def calls(request, monkeypatch):
    if request.param != "Python's calls":
        request.getfixturevalue("without_linux_calls")
    if request.param == "a Mac's":
        for module in (linux_calls, linux):
            monkeypatch.setattr(module, "LINUX", False)
        for name in ("sched_getaffinity", "sched_setaffinity"):
            monkeypatch.delattr(os, name)
        monkeypatch.setattr(linux_calls, "prctl", lambda *_: pytest.fail("no Mac has this"))


def test_the_end_of_a_process_is_seen():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        fd = linux_calls.pidfd_open(child.pid)
        try:
            assert not os.get_inheritable(fd)
            assert select.select([fd], [], [], 0.05)[0] == []
            child.kill()
            assert select.select([fd], [], [], 10)[0] == [fd]
            assert child.wait() == -signal.SIGKILL
        finally:
            os.close(fd)
        with pytest.raises(ProcessLookupError):
            linux_calls.pidfd_open(child.pid)


def test_a_file_in_memory():
    fd = linux_calls.memory_file("some", 10)
    with open(fd, "r+b") as file:
        assert not os.get_inheritable(fd) and file.read() == bytes(10)
    if linux_calls.LINUX:
        with pytest.raises(OSError) as error:
            linux_calls.memory_file("n" * 1000)
        assert error.value.errno == errno.EINVAL


def test_processors(calls):
    assert len(linux_calls.processors()) >= 1
    linux_calls.bind(linux_calls.processors())


def test_who_is_at_the_other_end(monkeypatch):
    """A Mac's answers are as its headers say; nobody gives such ones here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        if linux_calls.LINUX:
            assert linux_calls.peer(ours) == (os.getpid(), os.getuid())
            return
        told = {(0, 2): struct.pack("i", 4711), (0, 1): struct.pack("=IIh", 0, 501, 1).ljust(76, b"\0")}
        assert linux_calls.peer(SimpleNamespace(getsockopt=lambda *asked: told[asked[:2]])) == (4711, 501)


def test_an_end_that_no_kernel_tells_of():
    if not linux_calls.LINUX:
        linux_calls.end_with_parent(signal.SIGKILL)  # and nothing happens


def test_children():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in linux.children() and child.pid in linux.children(os.getpid())
        child.kill()
