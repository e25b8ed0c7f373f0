"""Tying processes to each other's lives, also where Python or the kernel lacks something."""

import os
import platform
import re
import select
import subprocess
import sys

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.job import linux


def test_the_end_of_a_process_is_seen():
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

    monkeypatch.setattr(linux, "pidfd_open", missing)
    with pytest.raises(FatalError) as stop:
        linux.pidfd(os.getpid())
    assert stop.value.code == 2
    assert re.search(f"pidfd_open.*Linux {platform.release()}.*Python {platform.python_version()}", str(stop.value))


def test_nothing_else_in_the_launcher_wants_it():
    """All of it goes through the one place that knows what to do without."""
    here = os.path.dirname(linux.__file__)
    for name in ("supervisor.py", "rank_bootstrap.py", "../llm.py"):
        with open(os.path.join(here, name)) as file:
            assert "pidfd_open" not in file.read()
