"""Whom a line's plans wake. How they travel: test_backends.py."""

from types import SimpleNamespace

from phalanx.comm import broadcast
from phalanx.comm.broadcast import WAKE_AFTER, MpiPlanBroadcast


class Handle:
    """Stands for a communicator on which everything arrives at once."""

    def Dup(self):
        return self

    def Ibcast(self, data, root):
        return SimpleNamespace(Test=lambda: True)


def test_after_a_pause_a_plan_wakes_those_that_it_is_for(monkeypatch):
    now, woken = [100.0], []
    monkeypatch.setattr(broadcast, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waker = SimpleNamespace(wake=woken.append)
    group = SimpleNamespace(handle=Handle())
    lines = [MpiPlanBroadcast(group, waker, range(0, 2)), MpiPlanBroadcast(group, waker, range(2, 4))]
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


def test_who_is_woken_finds_the_plan_under_way():
    """It looks for one for QUIET_AFTER, then sleeps for a quarter of a second; the lead may be held up in between."""
    done = []
    handle = Handle()
    handle.Ibcast = lambda data, root: done.append("sent") or SimpleNamespace(Test=lambda: True)
    waker = SimpleNamespace(wake=lambda ranks: done.append("woken"))
    line = MpiPlanBroadcast(SimpleNamespace(handle=handle), waker, range(2))
    line.publish(b"plan" * 2000)
    assert done == ["sent", "sent", "woken"]
