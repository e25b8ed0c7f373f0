"""Whom a line's plans wake. How they travel: test_backends.py."""

from types import SimpleNamespace

import pytest
from phalanx.comm import broadcast
from phalanx.comm.broadcast import QUIET_AFTER, WAKE_AFTER, MpiPlanBroadcast


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
    group = SimpleNamespace(handle=Handle(), rank=0, size=2)
    lines = [MpiPlanBroadcast(group, waker, range(0, 2)), MpiPlanBroadcast(group, waker, range(2, 4))]
    lines[1].publish(b"plan")
    assert woken == [range(2, 4)]
    now[0] += WAKE_AFTER / 2
    lines[1].publish(b"plan")
    assert woken == [range(2, 4)]  # they look for plans still
    lines[0].publish(b"plan")
    assert woken == [range(2, 4), range(0, 2)]  # another copy's plans keep nobody awake here
    now[0] += WAKE_AFTER * 2
    lines[1].publish(b"plan")
    assert woken[2:] == [range(2, 4)]


def test_who_is_woken_finds_the_plan_under_way():
    """It looks for one for QUIET_AFTER, then sleeps for a quarter of a second; the lead may be held up in between."""
    done = []
    handle = Handle()
    handle.Ibcast = lambda data, root: done.append("sent") or SimpleNamespace(Test=lambda: True)
    waker = SimpleNamespace(wake=lambda ranks: done.append("woken"))
    line = MpiPlanBroadcast(SimpleNamespace(handle=handle, rank=0, size=2), waker, range(2))
    line.publish(b"plan" * 2000)
    assert done == ["sent", "sent", "woken"]


@pytest.mark.parametrize("step, longest", [(0.001, 300e-6), (0.008, 500e-6), (0.1, 1e-3)])
def test_who_waits_for_a_plan_looks_less_often_the_longer_steps_are(monkeypatch, step, longest):
    """Plans that come every `step` seconds; each poll takes the GIL from the thread that launches kernels."""
    now, slept, came = [0.0], [], [0.0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    def arrive(data, root):
        came[0] += step
        due = came[0]
        return SimpleNamespace(Test=lambda: now[0] >= due)

    monkeypatch.setattr(broadcast, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    handle = Handle()
    handle.Ibcast = arrive
    waker = SimpleNamespace(wait=lambda seconds: sleep(QUIET_AFTER / 8) or True)
    line = MpiPlanBroadcast(SimpleNamespace(handle=handle, rank=0, size=2), waker, range(2))
    for _ in range(12):
        line.receive()
    polls = [one for one in slept if one != QUIET_AFTER / 8]
    assert max(polls) <= max(longest, 300e-6) * 1.05 and now[0] <= came[0] + max(slept)
    assert max(polls) > longest * 0.7 or step < 0.002


@pytest.mark.parametrize("kind", ["rest", "image"])
def test_data_under_way_is_waited_for_without_wake_ups(monkeypatch, kind):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    def arrive(data, root):
        if len(data) == broadcast.HEAD:
            data[:4].view("<u4")[0] = 2 * len(data)
            return SimpleNamespace(Test=lambda: True)
        return SimpleNamespace(Test=lambda: now[0] >= 20 * QUIET_AFTER)

    monkeypatch.setattr(broadcast, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    handle = Handle()
    handle.Ibcast = handle.Irecv = arrive
    waker = SimpleNamespace(wait=lambda seconds: pytest.fail("it rests"))
    line = MpiPlanBroadcast(SimpleNamespace(handle=handle, rank=1, size=2), waker, range(2))
    assert len(line.receive() if kind == "rest" else line.take(1 << 20)) >= broadcast.HEAD
    assert now[0] < 21 * QUIET_AFTER


def test_a_message_to_one_rank_keeps_no_broadcast_from_progress():
    tested = []
    handle = Handle()
    handle.Isend = lambda data, to: SimpleNamespace(Test=lambda: False)
    handle.Ibcast = lambda data, root: SimpleNamespace(Test=lambda: tested.append(True) or True)
    waker = SimpleNamespace(wake=lambda ranks: None)
    line = MpiPlanBroadcast(SimpleNamespace(handle=handle, rank=0, size=2), waker, range(2))
    line.publish(b"plan")
    line.send(b"image", 1)
    assert line.progress() and tested
