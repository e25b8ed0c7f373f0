import socket
import time
from types import SimpleNamespace

import pytest
from phalanx.comm import threads
from phalanx.comm.control import broadcast_bytes
from phalanx.comm.watch import Watch, _addresses, _listener, _Peer, _Stall
from phalanx.rank import exits

HOSTS = ["one", "two"]


@pytest.fixture(autouse=True)
def not_the_end(monkeypatch):
    """A watch that gives up fails its test, and not the whole run of tests by ending the process."""
    ends = []
    monkeypatch.setattr(Watch, "end", lambda self, code: ends.append((self.rank, code)))
    yield
    assert not ends


def test_a_rank_that_does_not_connect_is_named():
    def one(comm):
        if comm.rank == 0:
            Watch(comm, HOSTS, timeout=1)
        else:
            broadcast_bytes(comm)  # hears where to connect to, and does not

    with pytest.raises(exits.Stop, match="no watchdog connection from rank 1 on two within 1 s") as caught:
        threads.run(one, 2)
    assert caught.value.code == 71 and "over TCP" in str(caught.value)


def test_a_rank_that_cannot_reach_rank_0_says_what_it_tried():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    def one(comm):
        if comm.rank == 0:
            broadcast_bytes(comm, b"t" * 16 + f"{port},127.0.0.1".encode())
        else:
            Watch(comm, HOSTS, timeout=1)

    with pytest.raises(exits.Stop) as caught:
        threads.run(one, 2)
    want = f"rank 1 on two cannot reach rank 0 on one: tried 127.0.0.1, port {port}; the nodes need TCP between them"
    assert str(caught.value) == want


def test_a_stranger_is_turned_away_and_the_rank_let_in():
    def one(comm):
        if comm.rank:
            data = broadcast_bytes(comm)
            port = int(data[16:].decode().split(",")[0])
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"x" * 20)
                assert stranger.recv(1) == b""
            friend = socket.create_connection(("127.0.0.1", port))
            friend.sendall(data[:16] + (1).to_bytes(4, "little"))
            assert friend.recv(1)
            watch = None
        else:
            watch = Watch(comm, ["one", "one"], timeout=5)
            watch.wake()
        comm.barrier()
        if watch:
            watch.stop()
        comm.barrier()  # until then the connections are open: one that closes before the stop ends this process

    threads.run(one, 2)


def test_a_wake_up_ends_a_wait():
    def one(comm):
        watch = Watch(comm, ["one", "one"], timeout=5)
        comm.barrier()
        if comm.rank == 0:
            time.sleep(0.1)
            watch.wake()
        else:
            start = time.monotonic()
            watch.wait(3)
            assert time.monotonic() - start < 1
        comm.barrier()
        watch.stop()
        comm.barrier()

    threads.run(one, 2)


def test_messages_are_read_however_they_are_cut():
    from phalanx.comm.watch import _STATE

    wire = _STATE.pack(b"a", 0, 5, 4) + _STATE.pack(b"f", 5, 70, 0) + b"error" + _STATE.pack(b"w", 0, 0, 0)
    left, right = socket.socketpair()
    peer = _Peer(left, "rank 1")
    found = [m for byte in wire for m in peer.feed(bytes([byte]))]
    assert found == [(b"a", 5, 4, ""), (b"f", 70, 0, "error"), (b"w", 0, 0, "")]
    left.close(), right.close()


def test_a_step_is_stalled_only_when_the_same_one_stays_open():
    stall = _Stall(range(2), 10)
    assert not stall.lasts(0, {0: (3, 2), 1: (3, 2)})
    assert not stall.lasts(9, {0: (3, 2), 1: (3, 2)})
    assert stall.lasts(11, {0: (3, 2), 1: (3, 2)})
    assert not stall.lasts(12, {0: (4, 3), 1: (3, 2)})
    assert not stall.lasts(21, {0: (4, 3), 1: (4, 3)}), "the other one has moved"
    assert stall.lasts(32, {0: (4, 3), 1: (4, 3)})
    assert not stall.lasts(33, {0: (4, 4), 1: (4, 4)})
    assert not stall.lasts(50, {0: (5, 4), 1: (4, 4)})


def test_each_replica_is_judged_by_its_own_steps():
    busy, stuck = _Stall(range(2), 10), _Stall(range(2, 4), 10)
    for now in range(13):
        steps = {0: (now + 1, now), 1: (now + 1, now), 2: (7, 6), 3: (7, 7)}
        assert not busy.lasts(now, steps)
        assert stuck.lasts(now, steps) == (now > 10)


def test_a_silent_stranger_does_not_keep_the_ranks_out():
    def one(comm):
        watch = None
        if comm.rank:
            data = broadcast_bytes(comm)
            port = int(data[16:].decode().split(",")[0])
            silent = socket.create_connection(("127.0.0.1", port))
            time.sleep(0.1)
            friend = socket.create_connection(("127.0.0.1", port))
            friend.sendall(data[:16])
            time.sleep(0.1)
            friend.sendall((1).to_bytes(4, "little"))
            assert friend.recv(1)
            assert silent.recv(1) == b""
        else:
            watch = Watch(comm, ["one", "one"], timeout=10)
            watch.wake()
        comm.barrier()
        if watch:
            watch.stop()
        comm.barrier()  # until then the connections are open: one that closes before the stop ends this process

    start = time.monotonic()
    threads.run(one, 2)
    assert time.monotonic() - start < 3


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


def address(family, text):
    return SimpleNamespace(family=family, address=text)
