"""What all tests have around them: nothing that they start may outlive them, or write into the user's home."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from pathlib import Path

import pytest

from .processes import table, wait

MARK = "TESTS_OF_PHALANX"  # in the environment of all that is started, however it is detached


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory):
    """For the job files of servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """What a shell starts in its background ignores them, and so would all that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left():
    value = secrets.token_hex(8)
    os.environ[MARK] = value
    yield
    assert not wait(lambda: marked(f"{MARK}={value}".encode()), 20), "processes were left behind"


def marked(word: bytes) -> dict[int, str]:
    """The processes that have this in their environment, this one left out."""
    found = {}
    for pid, process in table().items():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found[pid] = process.line
    return found
