"""benchmarks/kills.py: a few kills, and how a batch's output is judged."""

import json

import pytest
from phalanx.benchmarks import kills

from .. import retries

pytestmark = retries.KILLS


def test_lost_and_twice_are_seen(tmp_path):
    (tmp_path / "out.jsonl").write_text("".join(json.dumps({"custom_id": name}) + "\n" for name in ("a", "b", "b")))
    lost, twice = kills.verdict(tmp_path / "out.jsonl", ["a", "b", "c"])
    assert "1 lost" in lost and "1 twice" in twice
    (tmp_path / "out.jsonl").write_text('{"custom_id": "a"}\n')
    assert kills.verdict(tmp_path / "out.jsonl", ["a"]) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_few_kills(tmp_path, capsys):
    file = tmp_path / "run.json"
    assert kills.main([str(file), "--batches", "2", "--servers", "3", "--start", "300"]) == 0, capsys.readouterr().out
    run = json.loads(file.read_text())
    assert sum(run["batches"]["kills"].values()) == 2
    assert run["batches"]["whole"] >= 1
    assert sum(run["servers"]["kills"].values()) == 3
    assert not run["servers"]["wrong"]
    assert kills.main([str(file), "--table"]) == 0 and "| servers | 3 |" in capsys.readouterr().out
