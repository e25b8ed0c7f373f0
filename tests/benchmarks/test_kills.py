"""benchmarks/kills.py: a few kills, and how a batch's output is judged."""

import json
import subprocess
import sys
import threading

import pytest
from phalanx import linux_calls
from phalanx.benchmarks import kills

from .. import retries

pytestmark = retries.KILLS


def test_lost_and_twice_are_seen(tmp_path):
    (tmp_path / "out.jsonl").write_text("".join(json.dumps({"custom_id": name}) + "\n" for name in ("a", "b", "b")))
    lost, twice = kills.verdict(tmp_path / "out.jsonl", ["a", "b", "c"])
    assert "1 lost" in lost and "1 twice" in twice
    (tmp_path / "out.jsonl").write_text('{"custom_id": "a"}\n')
    assert kills.verdict(tmp_path / "out.jsonl", ["a"]) == []


def test_files_add_up(tmp_path, capsys):
    """A fault in any of them is the sum's."""
    runs = [{"batches": {"kills": {"all": 2, "rank 1": 1}, "seconds": 60, "wrong": [], "whole": 1}},
            {"batches": {"kills": {"all": 1}, "seconds": 60, "wrong": ["all: r7 lost"], "whole": 2}}]  # fmt: skip
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    assert kills.main([*map(str, files), "--table"]) == 1
    said = capsys.readouterr().out
    _, kind, count, _, whole, minutes, wrong, _ = map(str.strip, said.splitlines()[2].split("|"))
    assert (kind, count, whole, minutes, wrong) == ("batches", "4", "3", "2", "1") and "r7 lost" in said


@pytest.mark.skipif(len(linux_calls.processors()) < 2, reason="one core is not shared out")
def test_jobs_share_the_cores():
    """So do their children."""
    seen, before = [], linux_calls.processors()
    barrier = threading.Barrier(2)

    def work():
        barrier.wait(10)
        code = "import os; print(*os.sched_getaffinity(0))"
        seen.append(set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()))

    kills.side_by_side(2, work)
    one, other = seen
    assert one and other and not one & other
    assert linux_calls.processors() == before


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_few_kills(tmp_path, capsys):
    file = tmp_path / "run.json"
    given = [str(file), "--batches", "2", "--servers", "3", "--start", "300", "--jobs", "2"]
    assert kills.main(given) == 0, capsys.readouterr().out
    run = json.loads(file.read_text())
    assert 2 <= sum(run["batches"]["kills"].values()) <= 3  # the other job may be at it, too
    assert run["batches"]["whole"] >= 1
    assert 3 <= sum(run["servers"]["kills"].values()) <= 4
    assert not run["servers"]["wrong"]
    assert kills.main([str(file), "--table"]) == 0 and "| servers |" in capsys.readouterr().out
