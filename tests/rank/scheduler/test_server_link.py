import os
import signal
import socket
import threading
import time

import pytest
from phalanx import errors
from phalanx.rank import protocol
from phalanx.rank.scheduler.server_link import ServerLink

from .toy import request


@pytest.fixture
def ends(tmp_path):
    """The scheduler's end and the server's, connected."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        link = ServerLink(path)
        server, _ = listener.accept()
    server.settimeout(10)
    yield link, server
    server.close()


def read(server, kind, count):
    frames, found = protocol.Frames(kind), []
    while len(found) < count:
        found += frames.feed(server.recv(1 << 16))
    return found


def test_requests_arrive_however_the_bytes_are_cut(ends):
    link, server = ends
    sent = [request("a", [1, 2], 5), protocol.Abort(["a", "b"]), protocol.Drain()]
    wire = b"".join(protocol.frame(m) for m in sent)
    got = []
    for i in range(0, len(wire), 7):
        server.sendall(wire[i : i + 7])
        got += link.receive(1)
    assert got == sent


def test_nothing_to_read_returns_at_once_or_after_the_time_given(ends):
    link, _ = ends
    start = time.monotonic()
    assert link.receive(0.0) == [] == link.receive(0.1)
    assert time.monotonic() - start < 1


def test_a_server_that_does_not_read_holds_nobody_up(ends):
    link, server = ends
    big = protocol.Deltas([protocol.Delta("a", tokens=list(range(1000)))] * 100)
    start = time.monotonic()
    for _ in range(50):
        link.send(big)
    assert time.monotonic() - start < 5
    got = []

    def reader():
        got.extend(read(server, protocol.ToServer, 50))

    thread = threading.Thread(target=reader)
    thread.start()
    while thread.is_alive():
        link.receive(0.01)  # what did not fit goes out as room comes
    assert got == [big] * 50


def test_an_end_of_file_is_the_end_of_the_job(ends):
    link, server = ends
    server.close()
    with pytest.raises(
        errors.FatalError, match="the server process has gone, so nobody is left to answer to"
    ) as caught:
        link.receive(1)
    assert caught.value.code == errors.RANK_FAILED


def test_a_server_that_is_not_there(tmp_path):
    with pytest.raises(errors.FatalError, match="the server process cannot be reached at .*/none: "):
        ServerLink(str(tmp_path / "none"))


def test_last_words_follow_what_was_sent_before(ends):
    link, server = ends
    link.send(protocol.Deltas([protocol.Delta("a", tokens=[1])]))
    link.fail("rank 1 on two has died", 137)
    assert read(server, protocol.ToServer, 2) == [
        protocol.Deltas([protocol.Delta("a", tokens=[1])]),
        protocol.Fatal("rank 1 on two has died", 137),
    ]


def test_a_signal_ends_a_wait_without_end(ends):
    link, _ = ends
    old = signal.getsignal(signal.SIGUSR1)
    try:
        link.catch_signals()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert link.receive(None) == []
        assert link.signalled
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, old)


def test_what_is_no_message_is_refused(ends):
    link, server = ends
    server.sendall((protocol.MAX_FRAME + 1).to_bytes(4, "little") + b"x")
    with pytest.raises(ValueError, match=f"at most {protocol.MAX_FRAME} are allowed"):
        link.receive(1)


def test_last_words_can_be_said_from_a_signal_handler_in_the_middle_of_a_send(ends):
    """As SIGTERM's does: the thread that it interrupts may hold the lock."""
    link, server = ends
    with link._lock:
        link.fail("the job was stopped", 130)
    assert read(server, protocol.ToServer, 1) == [protocol.Fatal("the job was stopped", 130)]
