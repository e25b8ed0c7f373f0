"""The host's share of a step."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from phalanx.benchmarks import step


def test_medians_of_the_last_steps(monkeypatch):
    """Time that replayed steps save is not what the prompts before took."""
    now = iter(range(1000))
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(now) / 1000)
    clock, owner = step.Clock(), SimpleNamespace(execute=lambda: owner.build(), build=lambda: None)
    clock.wrap(owner, "execute", "launch")
    clock.wrap(owner, "build", "build")
    for _ in range(3):
        owner.execute()
    assert {name: round(ms, 6) for name, ms in clock.medians(3).items() if ms} == {"build": 1, "launch": 2}
    owner.build = lambda: None
    for _ in range(4):
        owner.execute()
    assert {name: round(ms, 6) for name, ms in clock.medians(4).items() if ms} == {"launch": 1}


@pytest.mark.long
def test_a_run():
    """All parts that are wrapped are still there."""
    command = [sys.executable, step.__file__, "--batches", "2", "--steps", "4", "--device", "cpu", "--prefill", "1x8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    *_, header, line = done.stdout.splitlines()
    assert header.split() == ["batch", "ms/step", "tokens/s", *step.PARTS, "ms"] and line.split()[0] == "2"
