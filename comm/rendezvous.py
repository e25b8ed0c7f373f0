"""Where the watch's connections come from: each rank gets one with rank 0, over TCP, and none with anybody else.

Rank 0 has several addresses, and not all of them lead to it from everywhere: each node may have a docker0 with the same
one, a route may end nowhere, another program may listen there. So a rank tries all at once, says its half of a secret
that MPI has broadcast, and keeps the connection on which the other half comes back. Rank 0 answers a rank's first hello
and hangs up on its others, so that both ends keep the same connection and the watch sees none of those that close.
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

_HALF = 16  # bytes of the secret that a rank says; as many are the answer
_HELLO = _HALF + 4  # and the rank
_SOONER = 0.9  # of the timeout: a rank that reaches nobody knows more than rank 0, which misses it, and speaks first
_WORDS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.ETIMEDOUT: "timed out",
}


def gather_connections(world: Comm, hosts: list[str], timeout: float) -> dict[int, socket.socket]:
    """Rank 0's connection to each other rank; another rank's to rank 0. Raises Stop. Collective over world."""
    return _await_all(world, hosts, timeout) if world.rank == 0 else {0: _reach(world, hosts, timeout)}


class _Line:
    """A connection on which so many bytes are awaited."""

    def __init__(self, connection: socket.socket, awaited: int):
        self.connection = connection
        self.connection.setblocking(False)
        self._awaited = awaited
        self._heard = b""

    def hear(self) -> bytes | None:
        """What was awaited, or what there is of it if nothing more can come; None: not all is here yet."""
        try:
            data = self.connection.recv(self._awaited - len(self._heard))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._heard += data
        return None if data and len(self._heard) < self._awaited else self._heard


def _close_all(selector: selectors.BaseSelector) -> None:
    for key in [*selector.get_map().values()]:
        key.fileobj.close()  # type: ignore[union-attr]


# -- rank 0


def _await_all(world: Comm, hosts: list[str], timeout: float) -> dict[int, socket.socket]:
    one_host = len(set(hosts)) == 1
    addresses = ["127.0.0.1"] if one_host else _addresses()
    listener = _listener(one_host, world.size * len(addresses))
    secret = secrets.token_bytes(2 * _HALF)
    broadcast_bytes(world, secret + ",".join([str(listener.getsockname()[1]), *addresses]).encode())
    met: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(met) < world.size - 1 and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data is None:
                    _let_in(listener, selector)
                elif (hello := key.data.hear()) is not None:
                    selector.unregister(key.fileobj)
                    _greet(key.data.connection, hello, secret, met, world.size)
        _close_all(selector)
    if missing := [f"rank {r} on {hosts[r]}" for r in range(1, world.size) if r not in met]:
        raise errors.FatalError(
            f"no watchdog connection from {', '.join(missing)} within {timeout:g} s; the nodes must reach "
            f"{hosts[0]} over TCP ({', '.join(addresses)})",
            errors.RANK_STUCK,
        )
    return met


def _let_in(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    with contextlib.suppress(OSError):  # who called has hung up already; whoever stays out is named in the end
        connection, _ = listener.accept()
        selector.register(connection, selectors.EVENT_READ, _Line(connection, _HELLO))


def _greet(connection: socket.socket, hello: bytes, secret: bytes, met: dict[int, socket.socket], size: int) -> None:
    """Answer a rank that is heard for the first time; hang up on everybody else."""
    rank = int.from_bytes(hello[_HALF:], "little")
    known = len(hello) == _HELLO and secrets.compare_digest(hello[:_HALF], secret[:_HALF])
    if known and 0 < rank < size and rank not in met:
        with contextlib.suppress(OSError):  # this connection is lost, another of the rank's may not be
            connection.send(secret[_HALF:])
            met[rank] = connection
            return
    connection.close()


def _listener(one_host: bool, backlog: int) -> socket.socket:
    """On loopback if nobody comes from elsewhere, otherwise on every address of both families."""
    if one_host:
        listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    else:
        listener = socket.create_server(("", 0), backlog=backlog)
    listener.setblocking(False)
    return listener


def _addresses() -> list[str]:
    """This host's addresses, those that lead nowhere else left out unless there are no others."""
    every = [a for nic in psutil.net_if_addrs().values() for a in nic]
    old = [a.address for a in every if a.family == socket.AF_INET and not a.address.startswith("127.")]
    new = [a.address for a in every if a.family == socket.AF_INET6 and "%" not in a.address and a.address != "::1"]
    return old + (new if socket.has_dualstack_ipv6() else []) or ["127.0.0.1"]


# -- the other ranks


def _reach(world: Comm, hosts: list[str], timeout: float) -> socket.socket:
    data = broadcast_bytes(world)
    hello, answer = data[:_HALF] + world.rank.to_bytes(4, "little"), data[_HALF : 2 * _HALF]
    port, *addresses = data[2 * _HALF :].decode().split(",")
    fates = dict.fromkeys(addresses, "")
    found = _search(fates, int(port), hello, answer, _SOONER * timeout)
    if found is None:
        tried = ", ".join(f"{address} ({fate})" for address, fate in fates.items())
        raise errors.FatalError(
            f"rank {world.rank} on {hosts[world.rank]} cannot reach rank 0 on {hosts[0]}: tried {tried}, port {port}; "
            "the nodes need TCP between them",
            errors.RANK_STUCK,
        )
    return found


def _search(fates: dict[str, str], port: int, hello: bytes, answer: bytes, seconds: float) -> socket.socket | None:
    """Try all addresses; the connection on which the answer came, if any. `fates` tells what became of each."""
    deadline = time.monotonic() + seconds
    found = None
    with selectors.DefaultSelector() as selector:
        for address in fates:
            fates[address] = _dial(address, port, selector)
        while found is None and selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                address, line = key.data
                if key.events == selectors.EVENT_WRITE:
                    fates[address] = _say(hello, line.connection, selector, key.data)
                elif (heard := line.hear()) is not None:
                    selector.unregister(line.connection)
                    if heard == answer:
                        found = line.connection
                    else:
                        fates[address] = "answered by something else" if heard else "hung up"
                        line.connection.close()
        _close_all(selector)
    return found


def _dial(address: str, port: int, selector: selectors.BaseSelector) -> str:
    """Begin to connect; what to say of the address if nothing more becomes known."""
    try:
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as lacking:  # a family that this host does not have
        return _word(lacking.errno)
    line = _Line(connection, _HALF)
    error = connection.connect_ex((address, port))
    if error in (0, errno.EINPROGRESS):
        selector.register(connection, selectors.EVENT_WRITE, (address, line))
        return "timed out"
    connection.close()
    return _word(error)


def _say(hello: bytes, connection: socket.socket, selector: selectors.BaseSelector, data: object) -> str:
    """Connecting has come to an end, good or bad; what to say of the address if nothing more becomes known."""
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        selector.unregister(connection)
        connection.close()
        return _word(error)
    with contextlib.suppress(OSError):  # whether it is lost is seen where the answer is read
        connection.send(hello)
    selector.modify(connection, selectors.EVENT_READ, data)
    return "connected, but nothing answered"


def _word(error: int | None) -> str:
    return _WORDS.get(error or 0) or os.strerror(error or 0)
