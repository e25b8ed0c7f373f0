"""Rank 0's end of the unix socket to the server process. It never blocks the step loop."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading

from ... import errors
from .. import protocol


class ServerLink:
    """Non-blocking in both directions: messages that the socket does not take yet wait in a buffer.

    A lock guards the buffer, because the watchdog's thread may call `fail`.
    """

    def __init__(self, path: str):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise errors.FatalError(
                f"the server process cannot be reached at {path}: {error}", errors.RANK_FAILED
            ) from None
        self._socket.setblocking(False)
        self._frames = protocol.Frames(protocol.ToScheduler)
        self._out = bytearray()
        self._lock = threading.RLock()  # reentrant: SIGTERM's handler may send while the main thread sends
        self._wakeup, wake = socket.socketpair()
        wake.setblocking(False)
        self._wakeup.setblocking(False)
        self._wake = wake
        self._poll = select.poll()  # not select(), which takes no descriptor above 1023: ranks have many
        self._poll.register(self._socket)
        self._poll.register(self._wakeup, select.POLLIN)
        self.signalled = False  # SIGUSR1 has arrived: the job is to drain

    def catch_signals(self) -> None:
        """Make SIGUSR1 set `signalled` and end a blocking `receive`. Call it in the main thread.

        The launcher has blocked the signal: one sent during startup arrives now.
        """
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, self._on_usr1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])

    def _on_usr1(self, *_: object) -> None:
        self.signalled = True

    def send(self, message: object) -> None:
        with self._lock:
            self._out += protocol.frame(message)
        self.flush()

    def flush(self) -> None:
        """Send as much of the buffer as the socket takes now."""
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out:
                del self._out[: self._socket.send(self._out)]

    def receive(self, seconds: float | None) -> list[protocol.ToScheduler]:
        """The server's messages. Waits up to `seconds` for one; None: until a message or a signal comes.

        Raises FatalError when the server process has gone.
        """
        wanted = select.POLLIN | (select.POLLOUT if self._out else 0)
        self._poll.modify(self._socket, wanted)
        events = self._poll.poll(None if seconds is None else seconds * 1e3)
        readable = {fd for fd, event in events if event != select.POLLOUT}
        self.flush()
        if self._wakeup.fileno() in readable:
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(64)
        if self._socket.fileno() not in readable:
            return []
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            raise errors.FatalError("the server process has gone, so nobody is left to answer to", errors.RANK_FAILED)
        return self._frames.feed(data)

    def fail(self, message: str, code: int) -> None:
        """Tell the server why this process ends. Blocks for a second at most."""
        with self._lock, contextlib.suppress(OSError):
            self._out += protocol.frame(protocol.Fatal(message, code))
            self._socket.settimeout(1)
            self._socket.sendall(self._out)
            self._out.clear()

    def close(self) -> None:
        """Send what is left in the buffer, for five seconds at most, and close the socket."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.settimeout(5)
            self._socket.sendall(self._out)
        self._socket.close()
