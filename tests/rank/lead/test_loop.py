"""The loop itself: what it does when nothing runs, and with several replicas."""

import pytest
from phalanx.rank import step
from phalanx.rank.lead.loop import Lead

from .toy import Engine, alone, request


class Link:
    """The front's end as a script: what each look brings, and what was said."""

    signalled = False

    def __init__(self, *script):
        self.script = list(script)
        self.said = []

    def receive(self, seconds):
        if seconds is None and not self.script:
            raise EOFError  # it would wait for ever
        return self.script.pop(0) if self.script else []

    def send(self, message):
        self.said.append(message)

    def tokens(self, name):
        deltas = [delta for one in self.said if isinstance(one, step.Deltas) for delta in one.deltas]
        return [token for delta in deltas if delta.id == name for token in delta.tokens]


def test_blocks_are_checked_when_the_last_sequence_has_ended():
    engine = Engine()
    link = Link([request("a", [1, 2, 3], 5)])
    leak = engine.scheduler.blocks.take(1)
    with pytest.raises(RuntimeError, match="block accounting is broken"):
        Lead([engine.replica], link).run()
    assert leak and link.tokens("a") == alone([1, 2, 3], 5)


def test_it_waits_for_requests_and_drains():
    engine = Engine()
    link = Link([request("a", [1, 2, 3], 5)])
    with pytest.raises(EOFError):
        Lead([engine.replica], link).run()
    assert link.said[-1].stats.running == 0, "the figures of an idle engine"
    drain = Link([request("b", [1, 2, 4], 5)], [step.Drain(7)])
    assert Lead([engine.replica], drain).run() == 7
    assert drain.tokens("b") == alone([1, 2, 4], 5)
    assert engine.ranks.plans[-1].stop == 7


def test_replicas_go_on_side_by_side_and_figures_are_added_up():
    engines = [Engine(), Engine()]
    link = Link([request(str(i), [i, 1], 8) for i in range(4)], [step.Abort(["3"])], [step.Drain()])
    assert Lead([engine.replica for engine in engines], link).run() == 0
    assert all(link.tokens(str(i)) == alone([i, 1], 8) for i in range(3))
    assert all(engine.ranks.plans[-1].stop == 0 and len(engine.ranks.plans) > 5 for engine in engines)
    figures = Lead([engine.replica for engine in engines], link)._stats()
    assert figures.steps == sum(engine.scheduler.counters.steps for engine in engines)
    assert (figures.aborted, figures.blocks_total) == (1, 64)


def test_a_request_that_may_become_too_long_is_answered():
    link = Link([request("a", range(90), 20)], [step.Drain()])
    assert Lead([Engine().replica], link).run() == 0
    (delta,) = (delta for one in link.said if isinstance(one, step.Deltas) for delta in one.deltas)
    assert (delta.finish, delta.status) == ("error", 400) and "at most 100 fit" in delta.error
