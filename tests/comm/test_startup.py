"""When a start has come to a standstill, and who is to blame for it."""

import threading
from types import SimpleNamespace

import pytest
from phalanx import errors
from phalanx.comm import startup
from phalanx.comm.startup import StallTimer, StartupProgress, StartupState, laggards
from phalanx.comm.watchdog import Watchdog

LOADS = StartupState(2, 500, "loading weights", "rank/model/weights/striped.py: next")
WAITS = StartupState(2, 500, "loading weights", "comm/mpi.py: all_to_allv")
LATER = StartupState(3, 0, "measuring a step", "comm/mpi.py: all_gather")


@pytest.mark.parametrize(
    "ranks, want",
    [
        ([LATER, LOADS, LATER], [1]),
        ([LATER, WAITS, LATER], [1]),
        ([WAITS, LOADS, WAITS], [1]),
        ([LOADS, LOADS, WAITS], [0, 1]),
        ([WAITS, WAITS, WAITS], [0, 1, 2]),  # a collective that hangs though all are in it
    ],
)
def test_who_holds_the_others_up(ranks, want):
    assert laggards(dict(enumerate(ranks))) == want


def test_what_changes_is_no_standstill():
    one = StallTimer(10)
    assert not any(one.lasts(now, now // 9) for now in range(100))
    assert not one.lasts(100, None) and not one.lasts(200, None), "nothing that should change"
    assert not one.lasts(201, "a") and one.lasts(212, "a")


def test_a_rank_tells_its_phase_its_progress_and_its_place():
    one, ready, go = StartupProgress(), threading.Event(), threading.Event()

    def work():
        one.begin("loading weights")
        one.reached(7)
        ready.set()
        go.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(20)
    doing = one.look()
    assert doing[:3] == (1, 7, "loading weights") and doing.place == "tests/comm/test_startup.py: work"
    go.set()
    thread.join()
    one.begin("measuring a step")
    assert one.look()[:2] == (2, 0)  # what was done counts for its phase


def judge(watch, now, *peers):
    """Rank 0's messages about its peers, where it is not late itself."""
    for peer, doing in zip(watch._peers.values(), peers, strict=True):
        peer.doing = doing
    watch._judge_start(now)
    return watch.said


@pytest.fixture
def watch():
    one = Watchdog.__new__(Watchdog)
    one.said = []
    one._hosts = ["a", "b", "c"]
    one._start = SimpleNamespace(look=lambda: LATER)
    one._peers = {1: SimpleNamespace(), 2: SimpleNamespace()}
    one._standstill = StallTimer(600)
    one._give_up = lambda *said: one.said.append(said)
    return one


def test_a_standstill_of_all_ends_the_job(watch):
    assert not judge(watch, 0, LOADS, WAITS)
    assert not judge(watch, 590, LOADS._replace(done=501), WAITS), "a few bytes more"
    assert not judge(watch, 1180, LOADS._replace(done=501), WAITS)
    ((text, code),) = judge(watch, 1200, LOADS._replace(done=501), WAITS)
    assert code == errors.RANK_STUCK
    assert "600 s" in text and "loading weights (rank/model/weights/striped.py: next)." in text
    assert "rank 2" not in text and "--timeout" in text


def test_nothing_has_to_move_once_all_have_started(watch):
    watch._start = None
    assert not judge(watch, 0, None, None) and not judge(watch, 10_000, None, None)
    assert not judge(watch, 20_000, LOADS, None)
    assert judge(watch, 20_601, LOADS, None)  # one that does not come


def test_ten_minutes_at_least():
    """Nothing is logged of a large tensor on a slow disk before it has been read whole."""
    assert startup.PATIENCE >= 600
