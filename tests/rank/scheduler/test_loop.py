"""The loop itself: what it does when nothing runs, and with several replicas."""

import itertools
from types import SimpleNamespace

import msgspec
import pytest
from phalanx.rank import protocol
from phalanx.rank.scheduler import loop
from phalanx.rank.scheduler.blocks import SLICE
from phalanx.rank.scheduler.loop import StepLoop

from .toy import Engine, alone, request


class Link:
    """The server's end as a script: what each look brings, and what was said."""

    signalled = False

    def __init__(self, *script):
        self.script = list(script)
        self.said = []
        self.waits = []

    def receive(self, seconds):
        self.waits.append(seconds)
        if seconds is None and not self.script:
            raise EOFError  # it would wait for ever
        return self.script.pop(0) if self.script else []

    def send(self, message):
        self.said.append(message)

    def tokens(self, name):
        deltas = [delta for one in self.said if isinstance(one, protocol.Deltas) for delta in one.deltas]
        return [token for delta in deltas if delta.id == name for token in delta.tokens]


def test_a_leak_is_found_when_the_last_sequence_has_ended():
    engine = Engine()
    link = Link([request("a", [1, 2, 3], 5)])
    leak = engine.scheduler.blocks.allocate(1)
    with pytest.raises(RuntimeError, match="block accounting is broken"):
        StepLoop([engine.replica], link).run()
    assert leak and link.tokens("a") == alone([1, 2, 3], 5)
    assert set(link.waits[1:]) == {0.0}  # before it waits for anything


def test_what_no_count_shows_is_found_when_nobody_asks_anything():
    engine = Engine()
    link = Link([request("a", [1, 2, 3], 5)])
    engine.scheduler.blocks._blank[0] = engine.scheduler.blocks._blank[1]  # of 32: not taken by the request
    with pytest.raises(RuntimeError, match="block accounting is broken"):
        StepLoop([engine.replica], link).run()
    assert link.tokens("a") == alone([1, 2, 3], 5) and loop.AUDIT_AFTER in link.waits


class Looks(list):
    """A list that counts how many of its items are looked at."""

    count = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        self.count += len(found) if isinstance(at, slice) else 1
        return found


class CountingLink(Link):
    """Notes how many of the pool's blocks have been looked at whenever the server is listened to."""

    def __init__(self, blocks, *script):
        super().__init__(*script)
        self.blocks = blocks
        self.looks = []

    def receive(self, seconds):
        self.looks.append(self.blocks._hash_of.count)
        return super().receive(seconds)


def test_the_next_request_does_not_wait_for_a_look_at_all_blocks():
    """Nothing that depends on the pool's size is done when the last sequence ends; later a slice at a time."""
    engine = Engine(blocks=20 * SLICE, max_num_seqs=2)
    blocks = engine.scheduler.blocks
    blocks._hash_of = Looks(blocks._hash_of)
    link = CountingLink(blocks, [request("a", [1, 2, 3], 5)])
    with pytest.raises(EOFError):
        StepLoop([engine.replica], link).run()
    paused = link.waits.index(loop.AUDIT_AFTER)
    assert link.looks[paused] < 100, "the request's own"
    slices = [after - before for before, after in itertools.pairwise(link.looks[paused:])]
    assert max(slices) <= SLICE and sum(slices) >= blocks.count  # all are looked at, but not at once
    assert link.waits[-1] is None and link.waits[paused + 1 : -1] == [0.0] * (len(slices) - 1)


def test_a_request_interrupts_the_look_at_all_blocks():
    engine = Engine(blocks=100 * SLICE, max_num_seqs=2)
    blocks = engine.scheduler.blocks
    blocks._hash_of = Looks(blocks._hash_of)
    link = CountingLink(
        blocks, [request("a", [1, 2, 3], 5)], *[[]] * 150, [request("b", [1, 2, 4], 5)], [protocol.Drain()]
    )
    assert StepLoop([engine.replica], link).run() == 0
    assert link.tokens("b") == alone([1, 2, 4], 5)
    assert SLICE < blocks._hash_of.count < 90 * SLICE  # in the middle of it, and it was not carried to its end first


def test_it_waits_for_requests_and_drains():
    engine = Engine()
    link = Link([request("a", [1, 2, 3], 5)])
    with pytest.raises(EOFError):
        StepLoop([engine.replica], link).run()
    assert link.said[-1].stats.running == 0  # the figures of an idle engine
    drain = Link([request("b", [1, 2, 4], 5)], [protocol.Drain(7)])
    assert StepLoop([engine.replica], drain).run() == 7
    assert drain.tokens("b") == alone([1, 2, 4], 5)
    assert engine.ranks.plans[-1].stop == 7


def test_replicas_go_on_side_by_side_and_figures_are_added_up():
    engines = [Engine(), Engine()]
    link = Link([request(str(i), [i, 1], 8) for i in range(4)], [protocol.Abort(["3"])], [protocol.Drain()])
    assert StepLoop([engine.replica for engine in engines], link).run() == 0
    assert all(link.tokens(str(i)) == alone([i, 1], 8) for i in range(3))
    assert all(engine.ranks.plans[-1].stop == 0 and len(engine.ranks.plans) > 5 for engine in engines)
    figures = StepLoop([engine.replica for engine in engines], link)._stats()
    assert figures.steps == sum(engine.scheduler.counters.steps for engine in engines)
    assert (figures.aborted, figures.blocks_total) == (1, 64)


def test_a_request_that_may_become_too_long_is_answered():
    link = Link([request("a", range(90), 20)], [protocol.Drain()])
    assert StepLoop([Engine().replica], link).run() == 0
    (delta,) = (delta for one in link.said if isinstance(one, protocol.Deltas) for delta in one.deltas)
    assert (delta.finish, delta.status) == ("error", 400) and "at most 100 fit" in delta.error


@pytest.mark.parametrize("field, value", [("tokens", b"\1\0\0"), ("sampling", None), ("priority", "first")])
def test_a_request_that_cannot_be_scheduled_fails_alone(field, value):
    wrong = msgspec.structs.replace(request("a", [1, 2, 3], 5), **{field: value})
    link = Link([request("c", [3], 4), wrong, request("b", [1, 2], 4)], [protocol.Drain()])
    engine = Engine()
    assert StepLoop([engine.replica], link).run() == 0
    assert link.tokens("b") == alone([1, 2], 4)
    assert link.tokens("c") == alone([3], 4)
    (failed,) = (one for said in link.said if isinstance(said, protocol.Deltas) for one in said.deltas if one.error)
    assert (failed.id, failed.finish) == ("a", "error") and failed.status in (400, 500)


def test_a_grammar_that_no_process_can_compile_fails_alone(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", no_process)
    vocabulary = protocol.Vocabulary("{}", 10, ())
    link = Link([vocabulary, msgspec.structs.replace(request("a", [1], 5), grammar="start: /a/")], [protocol.Drain()])
    assert StepLoop([Engine().replica], link).run() == 0
    (failed,) = (one for said in link.said if isinstance(said, protocol.Deltas) for one in said.deltas)
    assert (failed.finish, failed.status) == ("error", 500) and "start a process" in failed.error


def no_process(*_, **__):
    raise BlockingIOError("cannot start a process")


@pytest.mark.parametrize(("drafts", "factor"), [(1, False), (100, True)])
def test_a_speed_up_is_said_once_enough_was_verified(caplog, drafts, factor):
    stats = StepLoop([Engine().replica], Link())._stats()
    measured = {
        "speculation": {"ngram": (drafts, 2 * drafts, drafts)},
        "speculation_seconds": 1.0,
        "plain_seconds": 1.5,
    }
    caplog.set_level("INFO")
    StepLoop([Engine().replica], Link())._report(msgspec.structs.replace(stats, **measured))
    assert f"{drafts} of {2 * drafts}" in caplog.messages[-1] and ("1.50" in caplog.messages[-1]) == factor


def test_a_log_of_weeks_stays_short(caplog, monkeypatch):
    """A line each time that there are twice as many drafts, a minute apart at least: 17 of 100,000 minutes."""
    one, now = StepLoop([Engine().replica], Link()), [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    caplog.set_level("INFO")
    stats = one._stats()
    for minute in range(1, 100_001, 10):
        now[0] = 61.0 * minute
        speculation = {"ngram": (10 * minute, 10 * minute, 5 * minute)}
        one._report(msgspec.structs.replace(stats, speculation=speculation, speculation_seconds=1, plain_seconds=1))
    said = [int(line.split(" of ")[1].split()[0]) for line in caplog.messages if "speculation" in line]
    assert 10 <= len(said) <= 17 and all(later >= 2 * earlier for earlier, later in itertools.pairwise(said))


def test_the_last_report_waits_for_no_minute(caplog):
    loop = StepLoop([Engine().replica], Link())
    caplog.set_level("INFO")
    for count, last in ((1, False), (2, False), (3, True), (3, True)):
        measured = {"speculation": {"ngram": (count, count, count)}, "speculation_seconds": 1.0, "plain_seconds": 1.5}
        loop._report(msgspec.structs.replace(loop._stats(), **measured), last)
    assert [line for line in caplog.messages if "speculation" in line and "3 of 3" in line] == [caplog.messages[-1]]
    assert not any("2 of 2" in line for line in caplog.messages)
