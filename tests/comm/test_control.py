"""Whom a line's plans wake. How they travel: test_backends.py."""

from types import SimpleNamespace

from phalanx.comm import control
from phalanx.comm.control import WAKE_AFTER, MpiControl


class Handle:
    """Stands for a communicator on which everything arrives at once."""

    def Dup(self):
        return self

    def Ibcast(self, data, root):
        return SimpleNamespace(Test=lambda: True)


def test_after_a_pause_a_plan_wakes_those_that_it_is_for(monkeypatch):
    now, woken = [100.0], []
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waker = SimpleNamespace(wake=woken.append)
    group = SimpleNamespace(handle=Handle())
    lines = [MpiControl(group, waker, range(0, 2)), MpiControl(group, waker, range(2, 4))]
    lines[1].publish(b"plan")
    assert woken == [range(2, 4)]
    now[0] += WAKE_AFTER / 2
    lines[1].publish(b"plan")
    assert woken == [range(2, 4)], "they look for plans still"
    lines[0].publish(b"plan")
    assert woken == [range(2, 4), range(0, 2)], "another copy's plans keep nobody awake here"
    now[0] += WAKE_AFTER * 2
    lines[1].publish(b"plan")
    assert woken[2:] == [range(2, 4)]
