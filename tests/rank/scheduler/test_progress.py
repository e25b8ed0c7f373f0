"""Messages to a user while weights load."""

import io
import logging
from types import SimpleNamespace

import pytest
from phalanx.rank import protocol
from phalanx.rank.options import Job, Options
from phalanx.rank.scheduler import progress
from phalanx.rank.scheduler.progress import Progress

GB = 10**9


@pytest.fixture
def clock(monkeypatch):
    """Moves on by half a second at each look."""
    now = [100.0]

    def monotonic():
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(progress.time, "monotonic", monotonic)


def test_the_server_is_told_and_the_log_every_few_seconds(clock, caplog):
    sent = []
    told = Progress("loading weights", sent.append, 0)
    with caplog.at_level(logging.INFO, "phalanx"):
        for done in range(11):
            told.look(done * GB, 10 * GB)
    assert sent == [protocol.Progress("loading weights", done * GB, 10 * GB) for done in range(1, 11)]
    (said,) = caplog.messages
    assert "6.00 of 10.00 GB" in said and "2.00 GB/s" in said


def test_not_at_every_step_but_of_the_end(monkeypatch):
    sent = []
    told = Progress("loading weights", sent.append, 0)
    for done in range(1000):
        told.look(done, 1000)
    told.look(1000, 1000)
    assert sent[-1].done == 1000 and len(sent) < 10


def test_a_bar_on_a_terminal(clock, monkeypatch, caplog):
    shown = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", shown)
    told = Progress("loading weights", lambda _: None, 70)
    for done in (0, 4, 10):
        told.look(done * GB, 10 * GB)
    lines = shown.getvalue().split("\r")
    assert any(" 40%|" in line and "4.00GB of 10.0GB, " in line and "GB/s, " in line for line in lines), lines
    assert lines[-1].startswith("loading weights 100%|") and lines[-1].endswith("\n")
    assert max(map(len, lines)) <= 71 and not caplog.records


def test_what_is_done_at_once_shows_no_bar(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", shown)
    told = Progress("loading weights", lambda _: None, 70)
    told.look(0, 5)
    told.look(5, 5)
    assert shown.getvalue() == ""


def test_only_rank_0_tells(clock, monkeypatch):
    pytest.importorskip("torch")  # this file is run where there is none, too
    from phalanx.comm.watchdog import LocalWatchdog
    from phalanx.rank.__main__ import Rank

    shown = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", shown)
    rank = Rank(Job(options=Options(), columns=70), None, ["here"], LocalWatchdog())
    rank._progress("loading weights")(1, 2)
    assert not shown.getvalue()
    sent = []
    rank.link = SimpleNamespace(send=sent.append)
    look = rank._progress("loading weights")
    look(0, 2 * GB)
    look(GB, 2 * GB)
    assert sent == [protocol.Progress("loading weights", GB, 2 * GB)] and " 50%|" in shown.getvalue()
