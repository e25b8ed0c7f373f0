"""Accepts connections, and decides which of them may stay: each holds a file descriptor, and there are only so many.

Three rules keep descriptors for those who use them. Connections get what the process may open, less a reserve for
files, the journal and the link to rank 0. Where they are all taken, the connection that has let the server wait
longest for its next byte makes room: an idle one, half a head, a TLS handshake or body that stalls. Where all of them
are being answered, the next few get 503, but for probes (/health), which are answered.

A client's address may have half of the connections. This machine's own addresses may have all of them, as a reverse
proxy has one address for all its clients.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import itertools
import logging
import os
import resource
import socket
import struct
import termios
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connection import Server, Stream

log = logging.getLogger(__name__)
MAX_RESERVED = 4096  # descriptors that connections never get; a quarter of all where that is less
SECOND_LOOK = 0.05  # seconds after which a connection that is one too many is looked at again
CROWDED_LIFE = 5.0  # seconds that such a one has, for a probe or for its 503
ACCEPTED = 128  # at most in one turn of the event loop, which others wait for
PAUSE = 1.0  # seconds without accepting where the system has no descriptor or no memory
WAIT_TIMEOUT = 120.0  # seconds for the next byte of a head, a body or a TLS handshake
WRITE_TIMEOUT = 60.0  # seconds in which a client takes TAKEN bytes of an answer that waits for it
TAKEN = 64 << 10
SWEEP = 5.0  # seconds between two looks at what has timed out
WARN_EVERY = 60.0  # seconds between two log lines of one kind
LOCAL = "this machine"


class Descriptors:
    """How many connections there may be."""

    def __init__(self, limit: int, used: int):
        """limit: what the process may open; used: what it has open already."""
        reserved = min(MAX_RESERVED, limit // 4)
        self.connections = max(4, limit - used - reserved)
        self.crowded = reserved // 3  # connections that are one too many
        self.per_client = self.connections // 2

    @classmethod
    def of_this_process(cls) -> Descriptors:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(limit, len(os.listdir("/dev/fd")))


class Client:
    """The connections from one address."""

    def __init__(self, name: str):
        self.name = name
        self.connections = 0
        self.waits: dict[Stream, float] = {}  # whose requests are not whole, since when; the longest silent first


class Listener:
    """Accepts the clients of one socket and hangs up on those that stall."""

    def __init__(self, sock: socket.socket, server: Server):
        self._sock = sock
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.descriptors = Descriptors.of_this_process()
        self.open = 0  # connections that stay
        self._crowd: dict[Stream, None] = {}  # one too many, the oldest first
        self._looked_at_again = 0
        self._clients: dict[str, Client] = {}
        self._blocked: dict[Stream, tuple[int, float]] = {}  # bytes that the client had taken, and when
        self._sweeping: asyncio.TimerHandle | None = None
        self._paused: asyncio.TimerHandle | None = None
        self._warned: dict[str, float] = {}
        self._loop.add_reader(sock, self._accept)

    def stop(self) -> None:
        """Stop accepting; the connections that are open stay."""
        if self._sock.fileno() < 0:
            return
        for timer in (self._paused, self._sweeping):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED):
            try:
                connection, address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no descriptor or memory: trying again at once would take a core for nothing
                self._pause(error)
                return
            self._admit(connection, address)

    def _pause(self, error: OSError) -> None:
        self._warn(
            "no connection can be accepted (%s): those that send nothing are closed, and it is tried again every second"
            "%s",
            error.strerror,
            "; raise `ulimit -n`" if error.errno == errno.EMFILE else "",
        )
        for _ in range(ACCEPTED):
            if not self._make_room():
                break
        self._loop.remove_reader(self._sock)
        self._paused = self._loop.call_later(PAUSE, lambda: self._loop.add_reader(self._sock, self._accept))

    def _admit(self, connection: socket.socket, address: Any, again: bool = False) -> None:
        name = name_of(address)
        client = self._clients.get(name) or Client(name)
        crowded = not self._has_room(client)
        if crowded and not again and self._looked_at_again < self.descriptors.crowded:
            self._looked_at_again += 1  # of many that come at once some are answered in a moment
            self._loop.call_later(SECOND_LOOK, self._admit_again, connection, address)
            return
        stream = self._server.stream_of(connection)
        if stream is None:
            return
        stream.enter(self, client, crowded)
        if crowded:
            if len(self._crowd) >= self.descriptors.crowded:
                next(iter(self._crowd)).close()
            self._crowd[stream] = None
            self._loop.call_later(CROWDED_LIFE, stream.close)
        else:
            self.open += 1
            client.connections += 1
            self._clients[client.name] = client
            self.waits(stream)
        self._server.handle_stream(stream, address)

    def _admit_again(self, connection: socket.socket, address: Any) -> None:
        self._looked_at_again -= 1
        self._admit(connection, address, again=True)

    def _has_room(self, client: Client) -> bool:
        """Whether one more connection of this client may stay, which may cost one that stalls."""
        if client.name != LOCAL and client.connections >= self.descriptors.per_client and not _close_oldest(client):
            self._warn("%s has %d connections, half of all: more are told 503", client.name, client.connections)
            return False
        if self.open >= self.descriptors.connections and not self._make_room():
            self._warn("all %d connections are in use: more are told 503; raise `ulimit -n`", self.open)
            return False
        return True

    def _make_room(self) -> bool:
        """Close the connection that has let the server wait longest, of the address that has most of them."""
        waiting = [client for client in self._clients.values() if client.waits]
        return bool(waiting) and _close_oldest(max(waiting, key=lambda client: client.connections))

    def left(self, stream: Stream) -> None:
        """A connection is closed."""
        client = stream.client
        client.waits.pop(stream, None)
        self._blocked.pop(stream, None)
        if stream.crowded:
            del self._crowd[stream]
            return
        self.open -= 1
        client.connections -= 1
        if not client.connections:
            self._clients.pop(client.name, None)

    def waits(self, stream: Stream) -> None:
        """The server waits for this client's next bytes from now on."""
        stream.client.waits.pop(stream, None)
        stream.client.waits[stream] = time.monotonic()
        self._sweep_soon()

    def blocked(self, stream: Stream) -> None:
        """The client's socket does not take all of an answer."""
        if stream not in self._blocked:
            self._blocked[stream] = stream.taken(), time.monotonic()
            self._sweep_soon()

    def _sweep_soon(self) -> None:
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(SWEEP, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        now = time.monotonic()
        for client in list(self._clients.values()):
            while client.waits and now - next(iter(client.waits.values())) >= WAIT_TIMEOUT:
                _close_oldest(client)
        for stream, (taken, since) in list(self._blocked.items()):
            if not stream.writing():
                del self._blocked[stream]
            elif stream.taken() - taken >= TAKEN:
                self._blocked[stream] = stream.taken(), now
            elif now - since >= WRITE_TIMEOUT:
                stream.cut()
        if self._blocked or any(client.waits for client in self._clients.values()):
            self._sweep_soon()

    def _warn(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._warned.get(message, -WARN_EVERY) >= WARN_EVERY:
            self._warned[message] = now
            log.warning(message, *values)


def _close_oldest(client: Client) -> bool:
    """Close the connection of a client that has let the server wait longest. False where it waits for none.

    One whose bytes have come, and were not read yet, makes room only where the longest silent 16 all have such bytes:
    then the server is late, not the client.
    """
    longest = list(itertools.islice(client.waits, 16))
    stream = next((one for one in longest if not _has_unread(one)), longest[0] if longest else None)
    if stream is None:
        return False
    stream.close()
    return True


def _has_unread(stream: Stream) -> bool:
    try:
        return bool(stream.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except (OSError, ValueError):  # nothing there, or closed
        return False


def name_of(address: Any) -> str:
    """Whose connection it is: an address of IPv4, a network of IPv6, this machine, or a unix socket's user."""
    if not isinstance(address, tuple):
        return LOCAL
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return LOCAL
    if isinstance(ip, ipaddress.IPv6Address):  # a host has all addresses of a /64
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


def unsent(sock: socket.socket) -> int:
    """Bytes that the system still holds for the other end."""
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0])
