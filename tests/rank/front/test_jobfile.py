"""The file that `phalanx chat` finds a server by: who may read it, and how one that a killed job left is recognised."""

import os
import stat
import subprocess
import sys
import time

from phalanx.rank.front import jobfile
from phalanx.rank.front.jobfile import JobFile


def mine(**changes) -> JobFile:
    pid = os.getpid()
    given = {"url": "http://127.0.0.1:2000", "host": "here", "model": "m", "pid": pid}
    given |= {"start": jobfile.start_of(pid), "pids": jobfile.namespace()}
    return JobFile(**{**given, **changes})


def test_the_directory(tmp_path):
    assert jobfile.directory({"XDG_STATE_HOME": "/state"}) == jobfile.Path("/state/phalanx/jobs")
    home = jobfile.Path.home()
    assert jobfile.directory({}) == home / ".local/state/phalanx/jobs"
    assert jobfile.directory({"XDG_STATE_HOME": "relative"}) == home / ".local/state/phalanx/jobs"  # as XDG says


def test_it_is_for_this_user_only(tmp_path):
    path = tmp_path / "state" / "phalanx" / "jobs" / "here-1.json"
    old = os.umask(0)
    try:
        jobfile.write(path, mine(key="secret"))
        jobfile.write(path, mine(key="secret", since=2.0))  # the second job of a pid
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == ["here-1.json"]
    assert jobfile.running(path.parent, "here")["here-1"] == mine(key="secret", since=2.0)
    jobfile.remove(path)
    jobfile.remove(path)
    assert not list(path.parent.iterdir())


def test_what_a_killed_job_left_is_cleaned(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = jobfile.start_of(child.pid)
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
        jobfile.write(tmp_path / f"{name}.json", job)
    (tmp_path / "damaged.json").write_text('{"url": ')
    assert list(jobfile.running(tmp_path, "here")) == ["older", "running", "in-a-container", "elsewhere", "in-time"]
    assert not (tmp_path / "other-process.json").exists() and not (tmp_path / "out-of-time.json").exists()
    child.communicate(b"\n")
    assert jobfile.start_of(child.pid) == 0
    assert list(jobfile.running(tmp_path, "here")) == ["older", "in-a-container", "elsewhere", "in-time"]
    assert jobfile.running(tmp_path / "none", "here") == {}


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    place = jobfile.directory({})
    assert place.is_absolute() and place.parts[-3:] == (str(os.getuid()), "phalanx", "jobs")
