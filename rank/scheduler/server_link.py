"""Rank 0's end of the unix socket to the server process. It never blocks the step loop."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import socket
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ... import errors, linux_calls
from .. import protocol
from ..framed_socket import FramedSocket

log = logging.getLogger(__name__)
UNREAD = 2048  # bytes that nobody has read, above which later heartbeats may not fit into the socket's buffer
# The socket's buffer holds 200 KB: images, which are megabytes, would take many steps if each read one such buffer.
READ_ON, READ_PATIENCE = 16 << 20, 1  # bytes, and milliseconds without any
KILL_PATIENCE = 2.0  # seconds for a killed server process to end


class ServerLink:
    """Non-blocking in both directions. The watchdog's thread may send, too."""

    def __init__(self, path: str):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise errors.FatalError(
                f"the server process cannot be reached at {path}: {error}", errors.RANK_FAILED
            ) from None
        self._socket.setblocking(False)
        self._server_pid, _ = linux_calls.peer(self._socket)
        self._closing = False
        self._ended: errors.FatalError | None = None  # why the watching thread has killed the server process
        self._messages = FramedSocket(self._socket, protocol.FromServer, self._reject)
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

    def _reject(self, message: Any, error: msgspec.ValidationError) -> None:
        """Fail a request that cannot be read, alone: the server checks values, but one that it lets pass must not end
        the job. Raises the error where the message is no request."""
        id = message.get("id") if isinstance(message, dict) and message.get("type") == "request" else None
        if not isinstance(id, str):
            raise error
        log.error("a request has a value that the scheduler cannot read: %s", error)
        why = f"the scheduler cannot read this request: {error}"
        self.send(protocol.Deltas([protocol.Delta(id, finish="error", error=why, status=500)]))

    def send(self, message: object) -> None:
        self._messages.send(message)

    def receive(self, seconds: float | None) -> list[protocol.ToScheduler]:
        """The server's messages. Waits up to `seconds` for one; None: until a message or a signal comes.

        Raises FatalError when the server process has gone.
        """
        wanted = select.POLLIN | (select.POLLOUT if self._messages.unsent else 0)
        self._poll.modify(self._socket, wanted)
        events = self._poll.poll(None if seconds is None else seconds * 1e3)
        readable = {fd for fd, event in events if event != select.POLLOUT}
        self._messages.flush()
        if self._wakeup.fileno() in readable:
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(64)
        if self._socket.fileno() not in readable:
            return []
        most, messages = self._messages.received + READ_ON, self._messages.receive()
        while messages is not None and self._messages.partial and self._messages.received < most:
            if not self._readable(READ_PATIENCE):
                break
            more = self._messages.receive()
            messages = None if more is None else messages + more
        if messages is None:
            raise self._ended or errors.FatalError(
                "the server process has gone, so nobody is left to answer to", errors.RANK_FAILED
            )
        return [one for one in messages if not isinstance(one, protocol.Heartbeat)]

    def _readable(self, milliseconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def watch(self, timeout: float, fail: Callable[[BaseException], None]) -> None:
        """Have a thread send heartbeats, and kill the server process where none of its own come for `timeout` seconds.

        Only a server process that sends heartbeats may be watched. `fail` gets the reason afterwards, and ends this
        process: `receive` would raise it too, but not before a model that is being loaded is there.
        """
        threading.Thread(target=self._watch, args=(timeout, fail), name="server-watch", daemon=True).start()

    def _watch(self, timeout: float, fail: Callable[[BaseException], None]) -> None:
        period = protocol.heartbeat_period(timeout)
        seen, heard = -1, time.monotonic()
        while not self._closing:
            began = time.monotonic()
            try:
                self.send(protocol.Heartbeat())
                time.sleep(period)
                now = time.monotonic()
                unread = int.from_bytes(fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4)), "little")
            except (OSError, ValueError):  # closed meanwhile
                return
            came = self._messages.received + unread
            stopped = now - began - period > timeout / 2  # this process was: the silence of others means nothing
            if came != seen or stopped or unread > UNREAD:
                seen, heard = came, now
            elif now - heard > timeout and not self._closing:
                return fail(self._end_server(timeout))

    def _end_server(self, timeout: float) -> errors.FatalError:
        """Kill the server process, if it is still there. Returns why this process has to end."""
        name = f"the server process (pid {self._server_pid})"
        if self._hung_up(0):
            return errors.FatalError(f"{name} has gone", errors.RANK_FAILED)
        self._ended = errors.FatalError(f"{name} did not answer for {timeout:g} s and was killed", errors.RANK_STUCK)
        if self._server_pid > 0:  # 0: in another container's namespace of process ids; os.kill(0) ends our own group
            with contextlib.suppress(OSError):  # its end of the socket is open, so the id is still its own
                os.kill(self._server_pid, signal.SIGKILL)
        self._hung_up(KILL_PATIENCE)
        return self._ended

    def _hung_up(self, seconds: float) -> bool:
        """Whether the other end is closed, after waiting for that for so long at most."""
        poll = select.poll()
        poll.register(self._socket, 0)  # hang-ups are always reported
        return bool(poll.poll(seconds * 1e3))

    def fail(self, message: str, code: int) -> None:
        """Tell the server why this process ends. Blocks for a second at most."""
        self._messages.send_rest(1.0, protocol.Fatal(message, code))

    def close(self) -> None:
        """Send what is left in the buffer, for five seconds at most, and close the socket."""
        self._closing = True
        self._messages.send_rest(5.0)
        self._socket.close()
