"""Memory that ranks share, and what keeps them from sharing it. tests/comm/battery.py adds up over it."""

import mmap
import os

import pytest
from phalanx.comm import shm, threads

SIZE = 1 << 16


def share(able=lambda rank: True):
    return threads.run(lambda host: shm.share(host, SIZE, able(host.rank)), 3)


def test_what_one_writes_all_read():
    open_before = len(os.listdir("/proc/self/fd"))
    found = share()
    assert [bytes(memory) for memory in found] == [bytes(SIZE)] * 3
    found[2][100:103] = b"two"
    assert [memory[100:103] for memory in found] == [b"two"] * 3
    assert len(os.listdir("/proc/self/fd")) <= open_before + 3  # mmap keeps one of its own for each


def refuse(*_):
    raise PermissionError("not here")


@pytest.mark.parametrize("name", ["ftruncate", "open"])
def test_where_the_system_refuses_nobody_shares(name, monkeypatch):
    monkeypatch.setattr(shm.os, name, refuse, raising=False)
    assert share() == [None] * 3


def test_pythons_that_lack_linux_calls(without_linux_calls):
    test_what_one_writes_all_read()


def test_another_file_of_that_number(monkeypatch, tmp_path):
    """A container's /proc with process numbers of its own; it is not written to."""
    other, whole = tmp_path / "other", os.open
    other.write_bytes(b"x" * SIZE)
    monkeypatch.setattr(shm.os, "open", lambda path, flags: whole(other, flags))
    assert share() == [None] * 3 and other.read_bytes() == b"x" * SIZE


def test_one_that_is_not_able_keeps_all_from_it():
    assert share(lambda rank: rank != 1) == [None] * 3


def test_mappings_that_do_not_see_each_other(monkeypatch):
    whole = mmap.mmap
    monkeypatch.setattr(shm.mmap, "mmap", lambda file, size: whole(file, size, flags=mmap.MAP_PRIVATE))
    assert share() == [None] * 3
