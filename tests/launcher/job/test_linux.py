"""Tying processes to each other's lives, also where Python or the kernel lacks something."""

import os
import platform
import select
import subprocess
import sys

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.job import linux


@pytest.fixture(params=["os.pidfd_open", "the system call"])
def way(request, monkeypatch):
    if request.param != "os.pidfd_open":
        monkeypatch.delattr(os, "pidfd_open", raising=False)


def test_the_end_of_a_process_is_seen(way):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        fd = linux.pidfd(child.pid)
        try:
            assert not os.get_inheritable(fd)
            assert select.select([fd], [], [], 0.05)[0] == []
            child.communicate(b"\n")
            assert select.select([fd], [], [], 10)[0] == [fd]
        finally:
            os.close(fd)
        with pytest.raises(ProcessLookupError):
            linux.pidfd(child.pid)


def test_an_old_kernel(monkeypatch):
    def missing(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing, raising=False)
    monkeypatch.setattr(linux, "_pidfd_open", missing)
    with pytest.raises(FatalError) as stop:
        linux.pidfd(os.getpid())
    assert stop.value.code == 2
    assert str(stop.value) == (
        "Linux 5.3 or newer is needed, with the system call pidfd_open (Function not implemented): this is Linux "
        f"{platform.release()} with Python {platform.python_version()}"
    )


def test_nothing_else_in_the_launcher_wants_it():
    """All of it goes through the one place that knows what to do without."""
    here = os.path.dirname(linux.__file__)
    for name in ("supervisor.py", "rank_bootstrap.py", "../llm.py"):
        with open(os.path.join(here, name)) as file:
            assert "pidfd_open" not in file.read()


def test_a_full_disk_ends_nothing():
    with open("/dev/full", "wb", buffering=0) as full:
        linux.write(full.fileno(), b"a line of a log")


def test_what_cannot_be_said_ends_nothing():
    code = "from phalanx.launcher.job import linux; linux.say('something'); print('went on')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert done.stdout == b"went on\n"
