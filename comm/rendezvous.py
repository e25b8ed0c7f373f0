"""Connects each rank with rank 0 over TCP, for the watchdog.

Rank 0 has several addresses, and not every one reaches it from every node: each node may have a docker0 with the same
address, a route may be dead, another program may listen there. So a rank tries all addresses at once. It sends the
first half of a secret that MPI has broadcast, and keeps the connection on which the second half comes back. Rank 0
answers a rank's first hello and closes the rank's other connections, so both ends keep the same one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import time

import psutil

from .. import errors
from .base import Comm
from .broadcast import broadcast_bytes

_HALF = 16  # bytes of each half of the secret: one in a rank's hello, the other in the answer
_HELLO = _HALF + 4  # half of the secret, and the rank
_EARLIER = 0.9  # of the timeout: a rank that fails to connect knows why, so it must fail before rank 0
_ERRORS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.ETIMEDOUT: "timed out",
}


def gather_connections(world: Comm, hosts: list[str], timeout: float) -> dict[int, socket.socket]:
    """On rank 0 a connection to every other rank; on the others one to rank 0. Collective over world.

    Raises FatalError where a connection is missing after `timeout` seconds.
    """
    return _accept_all(world, hosts, timeout) if world.rank == 0 else {0: _connect_to_rank_0(world, hosts, timeout)}


class _Connection:
    """A connection from which a fixed number of bytes is awaited."""

    def __init__(self, connection: socket.socket, awaited: int):
        self.connection = connection
        self.connection.setblocking(False)
        self._awaited = awaited
        self._received = b""

    def receive(self) -> bytes | None:
        """The awaited bytes, or fewer if the connection has closed; None while bytes are still missing."""
        try:
            data = self.connection.recv(self._awaited - len(self._received))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._received += data
        return None if data and len(self._received) < self._awaited else self._received


def _close_all(selector: selectors.BaseSelector) -> None:
    for key in [*selector.get_map().values()]:
        key.fileobj.close()  # type: ignore[union-attr]


# -- rank 0


def _accept_all(world: Comm, hosts: list[str], timeout: float) -> dict[int, socket.socket]:
    one_host = len(set(hosts)) == 1
    addresses = ["127.0.0.1"] if one_host else _addresses()
    listener = _listener(one_host, world.size * len(addresses))
    secret = secrets.token_bytes(2 * _HALF)
    broadcast_bytes(world, secret + ",".join([str(listener.getsockname()[1]), *addresses]).encode())
    connected: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(connected) < world.size - 1 and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data is None:
                    _accept(listener, selector)
                elif (hello := key.data.receive()) is not None:
                    selector.unregister(key.fileobj)
                    _greet(key.data.connection, hello, secret, connected, world.size)
        _close_all(selector)
    if missing := [f"rank {r} on {hosts[r]}" for r in range(1, world.size) if r not in connected]:
        raise errors.FatalError(
            f"no watchdog connection from {', '.join(missing)} within {timeout:g} s; the nodes must reach "
            f"{hosts[0]} over TCP ({', '.join(addresses)})",
            errors.RANK_STUCK,
        )
    return connected


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    with contextlib.suppress(OSError):  # the caller has hung up; ranks that never connect are named at the end
        connection, _ = listener.accept()
        selector.register(connection, selectors.EVENT_READ, _Connection(connection, _HELLO))


def _greet(
    connection: socket.socket, hello: bytes, secret: bytes, connected: dict[int, socket.socket], size: int
) -> None:
    """Answer a rank's first hello; close every other connection."""
    rank = int.from_bytes(hello[_HALF:], "little")
    known = len(hello) == _HELLO and secrets.compare_digest(hello[:_HALF], secret[:_HALF])
    if known and 0 < rank < size and rank not in connected:
        with contextlib.suppress(OSError):  # this connection is lost; another one of the same rank may work
            connection.send(secret[_HALF:])
            connected[rank] = connection
            return
    connection.close()


def _listener(one_host: bool, backlog: int) -> socket.socket:
    """A listener on loopback where all ranks share a host, else on all addresses of both families."""
    if one_host:
        listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    else:
        listener = socket.create_server(("", 0), backlog=backlog)
    listener.setblocking(False)
    return listener


def _addresses() -> list[str]:
    """This host's addresses, without loopback and link-local ones unless there are no others."""
    every = [a for nic in psutil.net_if_addrs().values() for a in nic]
    old = [a.address for a in every if a.family == socket.AF_INET and not a.address.startswith("127.")]
    new = [a.address for a in every if a.family == socket.AF_INET6 and "%" not in a.address and a.address != "::1"]
    return old + (new if socket.has_dualstack_ipv6() else []) or ["127.0.0.1"]


# -- the other ranks


def _connect_to_rank_0(world: Comm, hosts: list[str], timeout: float) -> socket.socket:
    data = broadcast_bytes(world)
    hello, answer = data[:_HALF] + world.rank.to_bytes(4, "little"), data[_HALF : 2 * _HALF]
    port, *addresses = data[2 * _HALF :].decode().split(",")
    fates = dict.fromkeys(addresses, "")
    found = _search(fates, int(port), hello, answer, _EARLIER * timeout)
    if found is None:
        tried = ", ".join(f"{address} ({fate})" for address, fate in fates.items())
        raise errors.FatalError(
            f"rank {world.rank} on {hosts[world.rank]} cannot reach rank 0 on {hosts[0]}: tried {tried}, port {port}; "
            "the nodes need TCP between them",
            errors.RANK_STUCK,
        )
    return found


def _search(fates: dict[str, str], port: int, hello: bytes, answer: bytes, seconds: float) -> socket.socket | None:
    """Try all addresses. Returns the connection with the right answer, if any; `fates` gets each address's result."""
    deadline = time.monotonic() + seconds
    found = None
    with selectors.DefaultSelector() as selector:
        for address in fates:
            fates[address] = _connect(address, port, selector)
        while found is None and selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                address, line = key.data
                if key.events == selectors.EVENT_WRITE:
                    fates[address] = _send_hello(hello, line.connection, selector, key.data)
                elif (received := line.receive()) is not None:
                    selector.unregister(line.connection)
                    if received == answer:
                        found = line.connection
                    else:
                        fates[address] = "answered by something else" if received else "hung up"
                        line.connection.close()
        _close_all(selector)
    return found


def _connect(address: str, port: int, selector: selectors.BaseSelector) -> str:
    """Begin to connect. Returns the address's result unless a later one replaces it."""
    try:
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as lacking:  # an address family that this host lacks
        return _error_text(lacking.errno)
    line = _Connection(connection, _HALF)
    error = connection.connect_ex((address, port))
    if error in (0, errno.EINPROGRESS):
        selector.register(connection, selectors.EVENT_WRITE, (address, line))
        return "timed out"
    connection.close()
    return _error_text(error)


def _send_hello(hello: bytes, connection: socket.socket, selector: selectors.BaseSelector, data: object) -> str:
    """Connecting has succeeded or failed. Returns the address's result unless a later one replaces it."""
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        selector.unregister(connection)
        connection.close()
        return _error_text(error)
    with contextlib.suppress(OSError):  # a lost connection shows where the answer is read
        connection.send(hello)
    selector.modify(connection, selectors.EVENT_READ, data)
    return "connected, but nothing answered"


def _error_text(error: int | None) -> str:
    return _ERRORS.get(error or 0) or os.strerror(error or 0)
