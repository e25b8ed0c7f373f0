"""Who comes to rank 0's watch, over which of its addresses, and what is said of those who cannot."""

import contextlib
import errno
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from phalanx import errors
from phalanx.comm import rendezvous, threads
from phalanx.comm.broadcast import broadcast_bytes
from phalanx.comm.rendezvous import _addresses, _listener, _search, gather_connections
from phalanx.comm.watchdog import Watchdog

from .. import retries

pytestmark = retries.CLOCKS

HOSTS = ["one", "two"]
HELLO, ANSWER = b"h" * 16 + (1).to_bytes(4, "little"), b"a" * 16


def test_a_rank_that_does_not_connect_is_named():
    def one(comm):
        if comm.rank == 0:
            gather_connections(comm, HOSTS, timeout=1)
        else:
            broadcast_bytes(comm)  # hears where to connect to, and does not

    with pytest.raises(errors.FatalError, match="rank 1 on two") as caught:
        threads.run(one, 2)
    assert caught.value.code == 71 and "nodes must reach" in str(caught.value)


def test_a_rank_that_cannot_reach_rank_0_says_what_it_tried():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    def one(comm):
        if comm.rank == 0:
            broadcast_bytes(comm, b"t" * 32 + f"{port},127.0.0.1,127.0.0.2,224.0.0.1".encode())
        else:
            Watchdog(comm, HOSTS, timeout=1)

    with pytest.raises(errors.FatalError) as caught:
        threads.run(one, 2)
    assert caught.value.code == 71
    for part in ("rank 1 on two", "127.0.0.1 (refused)", "224.0.0.1 (no route)", f"port {port}"):
        assert part in str(caught.value)


@contextlib.contextmanager
def stranger(address, port=0, says=None, backlog=5):
    """A listener of another program; `says` is called with each connection."""
    listener = socket.create_server((address, port), backlog=backlog)
    kept = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                kept.append(listener.accept()[0])
                says(kept[-1])

    thread = threading.Thread(target=serve)
    if says:
        thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        if says:
            thread.join()
        for one in [listener, *kept]:
            one.close()


def answer(connection):
    assert connection.recv(100) == HELLO
    time.sleep(0.3)  # 0.3 s are enough for the others to have had their say
    for part in (ANSWER[:5], ANSWER[5:] + b"next"):
        connection.sendall(part)
        time.sleep(0.05)  # longer than a read takes, so that it does not arrive as one piece


@pytest.fixture
def elsewhere():
    """A port on 127.0.0.2 to .5 where strangers hang up, echo, are silent, and let nobody in."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(stranger("127.0.0.2", says=lambda c: c.close()))
        stack.enter_context(stranger("127.0.0.3", port, says=lambda c: c.sendall(c.recv(100))))
        stack.enter_context(stranger("127.0.0.4", port, says=lambda c: None))
        stack.enter_context(stranger("127.0.0.5", port, backlog=0))
        stack.enter_context(socket.create_connection(("127.0.0.5", port)))  # its queue is full
        yield port


ELSEWHERE = {
    "127.0.0.2": "hung up",
    "127.0.0.3": "answered by something else",
    "127.0.0.4": "connected, but nothing answered",
    "127.0.0.5": "timed out",
    "127.0.0.6": "refused",
    "224.0.0.1": "no route",
}


def test_only_who_has_the_answer_is_believed(elsewhere):
    fates = dict.fromkeys([*ELSEWHERE, "127.0.0.7"], "")
    start = time.monotonic()
    with stranger("127.0.0.7", elsewhere, says=answer):
        found = _search(fates, elsewhere, HELLO, ANSWER, 10)
        assert time.monotonic() - start < 8  # or one address was waited for before the next
        assert found is not None and found.getpeername() == ("127.0.0.7", elsewhere)
        found.settimeout(5)
        assert found.recv(100) == b"next"
        found.close()


def test_what_became_of_each_address_is_told_when_the_time_is_over(elsewhere):
    fates = dict.fromkeys(ELSEWHERE, "")
    start = time.monotonic()
    assert _search(fates, elsewhere, HELLO, ANSWER, 0.5) is None
    assert 0.5 <= time.monotonic() - start < 0.5 * (len(ELSEWHERE) - 1)  # the time is that of all addresses together
    assert fates == ELSEWHERE


def test_a_family_that_this_host_lacks(monkeypatch):
    def lacking(family):
        raise OSError(errno.EAFNOSUPPORT, "")

    monkeypatch.setattr(rendezvous.socket, "socket", lacking)
    fates = {"fd00::1": ""}
    assert _search(fates, 1, HELLO, ANSWER, 1) is None
    assert list(fates) == ["fd00::1"] and "family" in fates["fd00::1"]


def test_a_rank_has_one_connection_however_many_addresses_lead_to_rank_0(monkeypatch):
    """Closing strangers are none of the watch's: no rank dies of them."""
    ends = []
    monkeypatch.setattr(Watchdog, "end", lambda self, code: ends.append((self.rank, code)))
    monkeypatch.setattr(rendezvous, "_addresses", lambda: [f"127.0.0.{i}" for i in range(1, 30)])

    def one(comm):
        watch = Watchdog(comm, ["one", "two", "three"], timeout=4)
        comm.barrier()
        time.sleep(0.1)  # connections that are not kept have closed by then
        watch.wake(range(3))
        assert comm.rank == 0 or watch.wait(2)  # what it holds is not what rank 0 sends on
        time.sleep(0.6)  # 0.6 s are enough for the watch to look at what it has, and to report
        comm.barrier()
        watch.stop()
        comm.barrier()

    for _ in range(2):
        threads.run(one, 3)
    assert not ends


def met_by(size, visit, timeout=5):
    """Rank 0 meets the others, whose part `visit` plays: with rank 0's address, the hello and the answer."""

    def one(comm):
        if comm.rank == 0:
            met = gather_connections(comm, ["one"] * size, timeout)
            assert sorted(met) == list(range(1, size))
            for connection in met.values():
                connection.close()
        else:
            data = broadcast_bytes(comm)
            address = ("127.0.0.1", int(data[32:].decode().split(",")[0]))
            visit(comm.rank, address, data[:16] + comm.rank.to_bytes(4, "little"), data[16:32])

    threads.run(one, size)


def test_a_rank_s_later_hellos_are_hung_up_on():
    over = threading.Event()

    def visit(rank, address, hello, answer):
        if rank == 2:
            assert over.wait(5)
        with socket.create_connection(address, timeout=5) as first, socket.create_connection(address) as second:
            first.sendall(hello)
            assert first.recv(100) == answer
            if rank == 2:
                return
            second.sendall(hello)
            assert second.recv(1) == b""
            first.settimeout(0.1)
            with pytest.raises(TimeoutError):  # it stays open
                first.recv(1)
            over.set()

    met_by(3, visit)


@pytest.mark.parametrize("wrong", ["secret", "rank", "rank 0"])
def test_a_stranger_is_turned_away_and_the_rank_let_in(wrong):
    def visit(rank, address, hello, answer):
        with socket.create_connection(address, timeout=5) as other:
            said = {"secret": b"x" * 20, "rank": hello[:16] + b"\2\0\0\0", "rank 0": hello[:16] + bytes(4)}[wrong]
            other.sendall(said)
            assert other.recv(1) == b""
        with socket.create_connection(address, timeout=5) as friend:
            friend.sendall(hello)
            assert friend.recv(100) == answer

    met_by(2, visit)


def test_a_silent_stranger_does_not_keep_the_ranks_out():
    def visit(rank, address, hello, answer):
        with socket.create_connection(address, timeout=5) as silent, socket.create_connection(address) as friend:
            time.sleep(0.1)  # the friend comes after rank 0 has waited for the silent one
            friend.sendall(hello[:16])
            time.sleep(0.1)  # longer than a read takes, so that it does not arrive as one piece
            friend.sendall(hello[16:])
            assert friend.recv(100) == answer
            assert silent.recv(1) == b""

    start = time.monotonic()
    met_by(2, visit, timeout=10)
    assert time.monotonic() - start < 8


def test_strangers_that_keep_coming_do_not_prolong_the_wait():
    over = threading.Event()

    def visit(rank, address, hello, answer):
        try:
            while not over.is_set():
                with socket.create_connection(address, timeout=5) as other:
                    other.sendall(b"x" * 20)
                    other.recv(1)
        except OSError:
            return  # rank 0 has given up

    start = time.monotonic()
    with pytest.raises(errors.FatalError, match="rank 1 on one"):
        met_by(2, visit, timeout=1)
    over.set()
    assert time.monotonic() - start < 8


def test_ranks_on_other_hosts_are_heard_on_both_families():
    with _listener(one_host=False, backlog=1) as listener:
        port = listener.getsockname()[1]
        for address in ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]:
            with socket.create_connection((address, port), timeout=5):
                listener.accept()[0].close()
    with _listener(one_host=True, backlog=1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_addresses_that_lead_nowhere_are_not_told(monkeypatch):
    nic = {
        "lo": [address(socket.AF_INET, "127.0.0.1"), address(socket.AF_INET6, "::1")],
        "ib0": [address(socket.AF_INET6, "fd00::7"), address(socket.AF_INET6, "fe80::1%ib0")],
        "eth0": [address(socket.AF_INET, "10.0.0.7"), address(socket.AF_PACKET, "02:00:00:00:00:01")],
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: nic)
    assert _addresses()[0] == "10.0.0.7"
    assert _addresses()[1:] == (["fd00::7"] if socket.has_dualstack_ipv6() else [])
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": nic["lo"]})
    assert _addresses() == ["127.0.0.1"]  # containers without a network, which share a loopback


def address(family, text):
    return SimpleNamespace(family=family, address=text)
