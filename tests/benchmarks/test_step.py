"""The host's share of a step."""

from types import SimpleNamespace

from phalanx.benchmarks import step


def test_medians_of_the_last_steps(monkeypatch):
    """What steps that are replayed do without is not what the prompts before took."""
    now = iter(range(1000))
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(now) / 1000)
    clock, owner = step.Clock(), SimpleNamespace(execute=lambda: owner.prepare(), prepare=lambda: None)
    clock.wrap(owner, "execute", "launch")
    clock.wrap(owner, "prepare", "prepare")
    for _ in range(3):
        owner.execute()
    assert {name: round(ms, 6) for name, ms in clock.medians(3).items() if ms} == {"prepare": 1, "launch": 2}
    owner.prepare = lambda: None
    for _ in range(4):
        owner.execute()
    assert {name: round(ms, 6) for name, ms in clock.medians(4).items() if ms} == {"launch": 1}
