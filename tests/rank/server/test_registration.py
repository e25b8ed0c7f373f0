"""A job's entry in the registry, as the job after it reads it."""

import os
import time

import pytest
from phalanx.rank.server import server_registry
from phalanx.rank.server.registration import DRAINING, READY, gave_files_up
from phalanx.rank.server.server_registry import RegisteredServer


@pytest.mark.parametrize(
    "entry, gave_up",
    [
        ({}, False),
        ({"state": READY, "has_files": True}, False),
        ({"state": DRAINING, "has_files": True}, False),
        ({"state": DRAINING}, True),
        ({"has_files": True, "beat": 1.0}, True),  # it was killed on its node
        ({"has_files": True, "host": "here", "pids": server_registry.namespace(), "start": 1}, True),  # and on this one
    ],
)
def test_whether_the_job_before_may_still_write_files(tmp_path, entry, gave_up):
    given = {"url": "http://x:1", "host": "there", "model": "m", "pid": os.getpid(), "beat": time.time()}
    server_registry.write(tmp_path / "old.json", RegisteredServer(**{**given, **entry}))
    assert gave_files_up(tmp_path / "old.json", "here") is gave_up


def test_a_job_whose_file_is_gone_or_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "old.json"
    assert gave_files_up(path, "here")
    path.write_text('{"of": "another version"}')
    assert gave_files_up(path, "here")
    monkeypatch.setattr(server_registry, "_read", lambda path: os.stat("/dev/null/x"))
    assert not gave_files_up(path, "here")  # the file system fails: nothing is known
