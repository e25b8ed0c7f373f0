import socket
import threading
import time

import pytest
from phalanx.comm import threads
from phalanx.comm.broadcast import broadcast_bytes
from phalanx.comm.watchdog import Watchdog, _Peer, _StepStall

from .. import retries

pytestmark = retries.KILLS


@pytest.fixture(autouse=True)
def not_the_end(monkeypatch):
    """A watch that gives up fails its test, and not the whole run of tests by ending the process."""
    ends = []
    monkeypatch.setattr(Watchdog, "end", lambda self, code: ends.append((self.rank, code)))
    yield
    assert not ends


def test_a_wake_up_ends_the_wait_of_the_ranks_that_it_is_for():
    def one(comm):
        watch = Watchdog(comm, ["one"] * 4, timeout=5)
        comm.barrier()
        if comm.rank == 0:
            time.sleep(0.1)  # the others wait by then; a wake-up that comes before is kept
            watch.wake(range(2, 4))
        else:
            meant = comm.rank >= 2
            assert watch.wait(10 if meant else 0.6) == meant
        comm.barrier()
        watch.stop()
        comm.barrier()  # until then the connections are open: one that closes before the stop ends this process

    threads.run(one, 4)


class Late(threading.Event):
    """The wake-up comes when the wait has just timed out."""

    def wait(self, timeout=None):
        found = super().wait(timeout)
        self.set()
        return found


def test_a_wake_up_that_comes_as_the_wait_times_out_is_not_lost():
    """The rank that it was for slept on for a quarter of a second."""
    watch = Watchdog.__new__(Watchdog)
    watch._event = Late()
    assert not watch.wait(0.01)
    watch._event.__class__ = threading.Event
    start = time.monotonic()
    assert watch.wait(5) and time.monotonic() - start < 4
    assert not watch.wait(0), "it is heard once"


def test_rank_0_is_not_called_silent_while_it_waits_for_others():
    """It was, by the rank that came first, and the one that was missing went unnamed."""

    def one(comm):
        if comm.rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                broadcast_bytes(comm, b"h" * 16 + b"a" * 16 + f"{listener.getsockname()[1]},127.0.0.1".encode())
                with listener.accept()[0] as connection:
                    connection.sendall(b"a" * 16)
                    time.sleep(1.6)  # longer than the timeout of rank 1
                    comm.barrier()
                    comm.barrier()
        else:
            watch = Watchdog(comm, ["one", "one"], timeout=1)
            comm.barrier()
            watch.stop()
            comm.barrier()

    threads.run(one, 2)


def test_messages_are_read_however_they_are_cut():
    from phalanx.comm.watchdog import _STATE

    wire = _STATE.pack(b"a", 0, 5, 4) + _STATE.pack(b"f", 5, 70, 0) + b"error" + _STATE.pack(b"w", 0, 0, 0)
    left, right = socket.socketpair()
    peer = _Peer(left, "rank 1")
    found = [m for byte in wire for m in peer.feed(bytes([byte]))]
    assert found == [(b"a", 5, 4, ""), (b"f", 70, 0, "error"), (b"w", 0, 0, "")]
    left.close(), right.close()


def test_a_step_is_stalled_only_when_the_same_one_stays_open():
    stall = _StepStall(range(2), 10)
    assert not stall.stuck(0, {0: (3, 2), 1: (3, 2)})
    assert not stall.stuck(9, {0: (3, 2), 1: (3, 2)})
    assert stall.stuck(11, {0: (3, 2), 1: (3, 2)})
    assert not stall.stuck(12, {0: (4, 3), 1: (3, 2)})
    assert not stall.stuck(21, {0: (4, 3), 1: (4, 3)})  # the other one has moved
    assert stall.stuck(32, {0: (4, 3), 1: (4, 3)})
    assert not stall.stuck(33, {0: (4, 4), 1: (4, 4)})
    assert not stall.stuck(50, {0: (5, 4), 1: (4, 4)})


def test_each_replica_is_judged_by_its_own_steps():
    busy, stuck = _StepStall(range(2), 10), _StepStall(range(2, 4), 10)
    for now in range(13):
        steps = {0: (now + 1, now), 1: (now + 1, now), 2: (7, 6), 3: (7, 7)}
        assert not busy.stuck(now, steps)
        assert stuck.stuck(now, steps) == (now > 10)


def test_a_pause_of_the_watch_itself_is_no_standstill():
    """A whole job that was stopped and goes on, as Slurm suspends one."""
    stall = _StepStall(range(2), 10)
    steps = {0: (3, 2), 1: (3, 2)}
    assert not stall.stuck(0, steps)
    stall.forgive(100)
    assert not stall.stuck(100, steps) and not stall.stuck(109, steps)
    assert stall.stuck(111, steps)


def test_a_step_that_is_predicted_to_take_long_has_longer():
    """A silent rank has not; and what was foretold of a model is forgotten with it."""
    watch = Watchdog.__new__(Watchdog)
    watch._timeout = 10
    watch.divide([range(2), range(2, 4)])
    steps = {rank: (3, 2) for rank in range(4)}
    for foretold, patience in ((5, 15), (2, 10), (0, 10)):
        assert watch.expect(foretold) == patience and watch._timeout == 10
        for stall in watch._stalls:
            stall.stuck(0, {0: (1, 1), 2: (1, 1)})
            assert not stall.stuck(1, steps) and not stall.stuck(patience + 0.5, steps)
            assert stall.stuck(patience + 1.5, steps)
