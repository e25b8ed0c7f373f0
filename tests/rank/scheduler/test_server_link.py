import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from phalanx import errors
from phalanx.rank import protocol
from phalanx.rank.scheduler import server_link
from phalanx.rank.scheduler.server_link import ServerLink

from ... import retries
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


def test_a_large_request_does_not_take_a_step_for_each_of_the_sockets_buffers(ends):
    """Other requests wait behind one with images."""
    link, server = ends
    images = [protocol.Pixels(b"d", 2048, 4096, bytes(24 << 20))]
    sent = [msgspec.structs.replace(request("a", [1, 2], 5), pixels=images), protocol.Abort(["b"])]
    sending = threading.Thread(target=server.sendall, args=(b"".join(map(protocol.frame, sent)),))
    sending.start()
    got, steps = [], 0
    while len(got) < 2:
        got += link.receive(1)
        steps += 1
        time.sleep(0.005)  # a step
    sending.join()
    assert got == sent and steps < 50


@retries.CLOCKS
def test_half_a_request_holds_nobody_up(ends):
    link, server = ends
    server.sendall(protocol.frame(request("a", [1, 2], 5))[:-1])
    start = time.monotonic()
    assert link.receive(1) == [] and time.monotonic() - start < 0.5


@retries.CLOCKS
def test_nothing_to_read_returns_at_once_or_after_the_time_given(ends):
    link, _ = ends
    start = time.monotonic()
    assert link.receive(0.0) == [] == link.receive(0.1)
    assert time.monotonic() - start < 1


@retries.CLOCKS
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
    with pytest.raises(errors.FatalError, match="process has gone") as caught:
        link.receive(1)
    assert caught.value.code == errors.RANK_FAILED


PEER = """
import os, socket, sys, time
from phalanx.rank import protocol
path, beats, end = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen(1)
print(flush=True)
server, _ = listener.accept()
for _ in range(int(beats)):
    server.sendall(protocol.frame(protocol.Heartbeat()))
    time.sleep(0.1)
os.kill(os.getpid(), 19) if end == "stops" else os._exit(0)
"""


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "loading"])
@pytest.mark.parametrize(
    ("beats", "end", "code"),
    [("0", "stops", errors.RANK_STUCK), ("25", "stops", errors.RANK_STUCK), ("5", "ends", errors.RANK_FAILED)],
)
def test_a_server_process_is_given_up(tmp_path, reads, beats, end, code):
    """A silent server is given up, but not while its heartbeats come or wait to be read; a stopped one is killed."""
    path, failed = str(tmp_path / "s"), threading.Event()
    with subprocess.Popen([sys.executable, "-c", PEER, path, beats, end], stdout=subprocess.PIPE) as peer:
        try:
            peer.stdout.readline()
            link, why = ServerLink(path), []
            link.watch(1.0, lambda error: (why.append(error), failed.set()))
            began = time.monotonic()
            with contextlib.suppress(errors.FatalError):
                while reads and not failed.is_set():
                    assert link.receive(0.05) == []  # heartbeats are for nobody else
            assert failed.wait(60)
            assert time.monotonic() - began > 0.1 * int(beats)
            (error,) = why
            assert error.code == code and str(peer.pid) in str(error)
            assert peer.wait(10) == (-signal.SIGKILL if end == "stops" else 0)
        finally:
            peer.kill()
    if end == "stops":
        with pytest.raises(errors.FatalError) as caught:  # the main thread gives the same reason
            while True:
                link.receive(1)
        assert caught.value is error


def test_a_silent_server_process_of_another_container_is_not_killed(ends, monkeypatch):
    """Its id is 0 here, which os.kill takes for this process's group."""
    link, _ = ends
    killed = []
    monkeypatch.setattr(server_link.os, "kill", lambda *process: killed.append(process))
    monkeypatch.setattr(server_link, "KILL_PATIENCE", 0.01)
    link._server_pid = 0
    assert link._end_server(1.0).code == errors.RANK_STUCK and not killed


def test_a_server_that_is_not_there(tmp_path):
    with pytest.raises(errors.FatalError, match="reached at .*/none"):
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
    with pytest.raises(ValueError, match=f"most {protocol.MAX_FRAME}.*allowed"):
        link.receive(1)


@pytest.mark.parametrize("field, value", [("top_k", 50.0), ("temperature", "0.5"), ("max_tokens", None)])
def test_a_request_that_cannot_be_read_fails_alone(ends, field, value):
    link, server = ends
    wrong = msgspec.structs.replace(request("a", [1, 2], 5).sampling, **{field: value})
    sent = [msgspec.structs.replace(request("a", [1, 2], 5), sampling=wrong), request("b", [1], 5)]
    server.sendall(b"".join(protocol.frame(one) for one in sent))
    assert link.receive(1) == sent[1:]
    (answer,) = read(server, protocol.ToServer, 1)
    (delta,) = answer.deltas
    assert (delta.id, delta.finish, delta.status) == ("a", "error", 500) and field in delta.error


def test_another_message_that_cannot_be_read_is_no_protocol(ends):
    link, server = ends
    server.sendall(protocol.frame(protocol.Drain("soon")))
    with pytest.raises(msgspec.ValidationError):
        link.receive(1)


def test_last_words_can_be_said_from_a_signal_handler_in_the_middle_of_a_send(ends):
    """A signal's handler, as SIGTERM's: the thread that it interrupts may hold the lock."""
    link, server = ends
    with link._messages._lock:
        link.fail("the job was stopped", 130)
    assert read(server, protocol.ToServer, 1) == [protocol.Fatal("the job was stopped", 130)]
