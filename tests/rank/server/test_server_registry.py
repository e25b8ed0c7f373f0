"""The file that `phalanx chat` finds a server by: who may read it, and how one that a killed job left is recognised."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from phalanx.rank.server import server_registry
from phalanx.rank.server.server_registry import RegisteredServer


def mine(**changes) -> RegisteredServer:
    pid = os.getpid()
    given = {"url": "http://127.0.0.1:2000", "host": "here", "model": "m", "pid": pid}
    given |= {"start": server_registry.start_of(pid), "pids": server_registry.namespace()}
    return RegisteredServer(**{**given, **changes})


def test_the_directory(tmp_path):
    assert server_registry.directory({"XDG_STATE_HOME": "/state"}) == server_registry.Path("/state/phalanx/jobs")
    home = server_registry.Path.home()
    assert server_registry.directory({}) == home / ".local/state/phalanx/jobs"
    assert (
        server_registry.directory({"XDG_STATE_HOME": "relative"}) == home / ".local/state/phalanx/jobs"
    )  # as XDG says


def test_it_is_for_this_user_only(tmp_path):
    path = tmp_path / "state" / "phalanx" / "jobs" / "here-1.json"
    old = os.umask(0)
    try:
        server_registry.write(path, mine(key="secret"))
        server_registry.write(path, mine(key="secret", since=2.0))  # the second job of a pid
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == ["here-1.json"]
    assert server_registry.running(path.parent, "here")["here-1"] == mine(key="secret", since=2.0)
    server_registry.remove(path)
    server_registry.remove(path)
    assert not list(path.parent.iterdir())


def test_what_a_killed_job_left_is_cleaned(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = server_registry.start_of(child.pid)
    files = {
        "running": mine(pid=child.pid, start=start, since=5.0),
        "older": mine(since=4.0),
        "other-process": mine(start=1),  # the pid is in use again
        "in-a-container": mine(pids=1, start=1, since=5.5),  # its processes have other numbers
        "elsewhere": mine(host="there", pid=1, start=1, since=6.0),  # nobody here can tell
        "out-of-time": mine(host="there", end=time.time() - 3600),
        "in-time": mine(host="there", end=time.time() + 3600, since=7.0),
    }
    for name, job in files.items():
        server_registry.write(tmp_path / f"{name}.json", job)
    (tmp_path / "damaged.json").write_text('{"url": ')
    assert list(server_registry.running(tmp_path, "here")) == [
        "older",
        "running",
        "in-a-container",
        "elsewhere",
        "in-time",
    ]
    assert not (tmp_path / "other-process.json").exists()
    assert not (tmp_path / "out-of-time.json").exists()
    child.communicate(b"\n")
    assert server_registry.start_of(child.pid) == 0
    assert list(server_registry.running(tmp_path, "here")) == ["older", "in-a-container", "elsewhere", "in-time"]
    assert server_registry.running(tmp_path / "none", "here") == {}


@pytest.mark.parametrize("age, kept", [(5, True), (300, False), (None, False)])
def test_a_job_whose_end_was_moved_is_not_over_while_it_beats(tmp_path, age, kept):
    now = time.time()
    job = mine(host="there", end=now - 3600, beat=now - age if age is not None else 0.0)
    server_registry.write(tmp_path / "moved.json", job)
    assert ("moved" in server_registry.running(tmp_path, "here")) is kept
    assert (tmp_path / "moved.json").exists() is kept


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    place = server_registry.directory({})
    assert place.is_absolute() and place.parts[-3:] == (str(os.getuid()), "phalanx", "jobs")


def another(found):
    """The registry folder of another user."""
    return os.stat_result((*found[:4], os.getuid() + 1, *found[5:]))


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A directory for everybody, and this user's place in it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    server_registry._warn.cache_clear()
    return server_registry.directory({})


def test_what_another_user_has_put_into_tmp_is_passed_over(shared, monkeypatch, caplog):
    server_registry.write(shared / "a.json", mine())
    assert list(server_registry.running(shared, "here")) == ["a"]
    real = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: another(real(path)) if path == shared.parent else real(path))
    assert server_registry.running(shared, "here") == server_registry.running(shared, "here") == {}
    assert caplog.text.count("passed over") == 1
    assert f"passed over: {shared.parent}" in caplog.text
    with pytest.raises(PermissionError, match="of yours"):
        server_registry.write(shared / "b.json", mine())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_directory_in_tmp_that_others_may_write_to(shared, which, caplog):
    server_registry.write(shared / "a.json", mine())
    [shared, shared.parent, shared.parent.parent][which].chmod(0o777)
    assert server_registry.running(shared, "here") == {}
    assert "others may write to" in caplog.text
    with pytest.raises(PermissionError, match="others may write to"):
        server_registry.write(shared / "b.json", mine())


def test_a_link_in_place_of_the_directory(shared, tmp_path):
    server_registry.write(tmp_path / "planted" / "a.json", mine())
    shared.parent.mkdir(parents=True)
    shared.symlink_to(tmp_path / "planted")
    assert server_registry.running(shared, "here") == {}


def test_a_file_of_another_user(shared, monkeypatch):
    server_registry.write(shared / "a.json", mine())
    server_registry.write(shared / "b.json", mine())
    (shared / "c.json").symlink_to(shared / "a.json")
    inode, real = (shared / "b.json").stat().st_ino, os.fstat

    def fstat(file):
        found = real(file)
        return another(found) if found.st_ino == inode else found

    monkeypatch.setattr("os.fstat", fstat)
    assert list(server_registry.running(shared, "here")) == ["a"]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A directory that is not below one for everybody."""
    monkeypatch.setattr(server_registry, "_below_shared", lambda place: [])
    server_registry._warn.cache_clear()
    return tmp_path / "jobs"


def test_outside_tmp_too_a_file_of_another_user_or_that_others_may_write_is_passed_over(elsewhere, monkeypatch, caplog):
    for name in ("mine", "theirs", "open"):
        server_registry.write(elsewhere / f"{name}.json", mine())
    (elsewhere / "open.json").chmod(0o660)
    inode, real = (elsewhere / "theirs.json").stat().st_ino, os.fstat

    def fstat(file):
        found = real(file)
        return another(found) if found.st_ino == inode else found

    monkeypatch.setattr("os.fstat", fstat)
    for _ in range(2):
        assert list(server_registry.running(elsewhere, "here")) == ["mine"]
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 2 and "open.json" in told[0] and "theirs.json" in told[1]


@pytest.mark.parametrize("mode, ours, read", [
    (0o2770, False, False), (0o777, False, False), (0o1770, False, True), (0o755, False, True), (0o775, True, True),
])  # fmt: skip
def test_a_directory_outside_tmp_that_others_may_write_to(elsewhere, monkeypatch, caplog, mode, ours, read):
    server_registry.write(elsewhere / "a.json", mine())
    elsewhere.chmod(mode)
    real = Path.stat
    if not ours:
        monkeypatch.setattr(
            Path, "stat", lambda path, **given: (another if path == elsewhere else lambda x: x)(real(path, **given))
        )
    assert list(server_registry.running(elsewhere, "here")) == ["a"] * read
    assert ("others may write to" in caplog.text) is not read


def test_directories_are_made_for_this_user_only(shared):
    old = os.umask(0)
    try:
        server_registry.write(shared / "a.json", mine())
    finally:
        os.umask(old)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (shared, shared.parent, shared.parent.parent)] == [0o700] * 3


def test_heartbeats_of_a_clock_that_was_set(tmp_path):
    """One far in the future says nothing: it would keep a job alive that ended an hour ago."""
    now = time.time()
    assert server_registry.beats(mine(beat=now - 5)) and server_registry.beats(mine(beat=now + 5))
    assert not server_registry.beats(mine(beat=now - 3600)) and not server_registry.beats(mine(beat=now + 3600))
    assert server_registry.over(mine(host="there", end=now - 3600, beat=now + 3600), "here")
