"""A batch job that starts again: with full disks, a damaged journal, or another input in between."""

import json
import os
import re
import resource

from phalanx.rank.server.batch import batch_input

from ....fields import each
from .test_run import NAMES, interrupt


def test_a_full_disk_under_the_journal(stage, capsys):
    stage.input(30)
    stage.scheduler_has = {"most": 5}
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def fill(stage):
        await stage.until(lambda: stage.batch.counts.done == 5)
        size = os.path.getsize(stage.place / "out.jsonl.journal")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, old[1]))
        stage.scheduler.most = 30

    try:
        assert stage.start(fill, summary="") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    err = capsys.readouterr().err
    assert "out.jsonl.journal: File" in err
    stage.scheduler_has = {}
    assert stage.start() == 0
    assert sorted(stage.ids()) == sorted(NAMES)
    assert 0 < stage.summary["run"]["requests"] <= 25


def test_a_full_disk_under_the_output(stage, capsys):
    stage.input(30)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def fill(stage):
        await stage.until(lambda: len(stage.scheduler.requests) == 30)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, old[1]))

    # Lines in the journal already stay there; the last lines and the output find no room.
    try:
        assert stage.start(fill, summary="") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert stage.left() == ["out.jsonl.journal"]
    assert stage.start() == 0
    assert sorted(stage.ids()) == sorted(NAMES)
    assert "File too large" in capsys.readouterr().err


def test_a_summary_that_cannot_be_written(stage, capsys):
    stage.input(1)
    assert stage.start(summary="/proc/none/summary") == 0
    assert "phalanx: --summary /proc/none/summary:" in capsys.readouterr().err


def test_an_input_that_has_grown(stage):
    interrupt(stage)
    stage.scheduler_has = {}
    path = stage.place / "in.jsonl"
    text = path.read_text()
    path.write_text(text + json.dumps({"custom_id": "new", "url": "/v1/completions", "body": {"prompt": "x"}}) + "\n")
    assert stage.start() == 0
    assert sorted(stage.ids()) == sorted([*NAMES, "new"])


def test_a_request_that_changed(stage, capsys, monkeypatch):
    monkeypatch.setattr(batch_input, "HEAD", 4)
    interrupt(stage)
    path = stage.place / "in.jsonl"
    path.write_text(path.read_text().replace("hello 3", "HELLO 3"))
    stage.scheduler_has = {}
    assert stage.start() == 2
    assert "input changed since" in capsys.readouterr().err
    assert stage.start(overwrite=True) == 0
    assert sorted(stage.ids()) == sorted(NAMES)


def test_requests_that_are_no_longer_wanted_are_left_out(stage, capsys, monkeypatch):
    monkeypatch.setattr(batch_input, "HEAD", 4)
    interrupt(stage)
    stage.input(30)
    path = stage.place / "in.jsonl"
    kept = [line for line in path.read_text().splitlines() if '"r2"' not in line]
    path.write_text("\n".join(kept) + "\n" * 500)
    stage.scheduler_has = {}
    assert stage.start() == 0
    assert "1 finished requests" in capsys.readouterr().err
    assert sorted(stage.ids()) == sorted(set(NAMES) - {"r2"})


def test_a_torn_and_a_damaged_line_are_told(stage, capsys):
    interrupt(stage)
    path = stage.place / "out.jsonl.journal"
    data = path.read_bytes()
    first = re.search(rb'"r\d"', data).group()  # answers come in any order: the last line is the one that is torn
    path.write_bytes(data.replace(first, first.replace(b"r", b"x"))[:-7])
    stage.scheduler_has = {}
    assert stage.start() == 0
    err = capsys.readouterr().err
    assert "6 finished requests" in err
    assert "journal's last line" in err and "1 damaged lines;" in err
    assert sorted(stage.ids()) == sorted(NAMES)


def test_the_output_is_made_of_a_complete_journal_without_ranks(stage):
    """Killed between the last answer and the output."""
    stage.input(5)
    stage.start()
    before = stage.read()
    (stage.place / "out.jsonl").unlink()
    stage.input(5)

    stage.start(output=str(stage.place / "other.jsonl"))
    assert set(each(before, "custom_id")) == set(each(stage.read("other.jsonl"), "custom_id"))
