"""All parts of a step that host.py times are still there."""

import json
import subprocess
import sys

import pytest
from phalanx.benchmarks import host


@pytest.mark.long
def test_a_run():
    command = [sys.executable, host.__file__, "--sequences", "4", "--steps", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["prefix_cache"], line["arrivals"]) for line in lines] == [
        (True, 0),
        (True, 1),
        (False, 0),
        (False, 1),
    ]
    each = {"schedule", "encode", "apply", "output", "update", "frame"}
    assert [set(line["us"]) for line in lines] == [each | {"send"}, each | {"build"}] * 2


def test_prompts_before_are_not_counted(monkeypatch):
    """However many steps they take."""
    monkeypatch.setattr(host, "WARM", 0)
    made = host.HostSteps(30, False)
    made.scheduler.token_budget = 64
    made.add(30)
    parts = made.run(3, 0)
    assert "send" in parts
    assert "build" not in parts
    assert len(made.taken["send"]) == 3


@pytest.mark.parametrize("arrivals", [0, 1])
def test_more_steps_than_a_sequence_has(monkeypatch, arrivals):
    monkeypatch.setattr(host, "LONGEST", 1152)
    made = host.HostSteps(8, False)
    made.add(8)
    with pytest.raises(ValueError, match="--steps 2000.*longest"):
        made.run(2000, arrivals)
    made = host.HostSteps(8, False)
    made.add(8)
    most = 1152 - max(len(one.tokens) for one in made.scheduler.waiting) - host.WARM
    assert made.run(most - 20, 0)
