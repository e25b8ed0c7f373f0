"""Messages of protocol.py over a stream socket, which may block or not."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from . import protocol

MAX_CHUNK = 1 << 20  # bytes that are sent at a time


class FramedSocket:
    """Sends and receives messages. What a socket that does not block will not take yet waits in a buffer.

    Any thread may send; one receives.
    """

    def __init__(
        self,
        sock: socket.socket,
        message_type: Any,
        reject: Callable[[Any, msgspec.ValidationError], None] | None = None,
    ):
        """message_type: of those that come. reject: as protocol.Frames has it."""
        self.socket = sock
        self.received = 0  # bytes
        self._frames = protocol.Frames(message_type, reject)
        self._out = bytearray()
        self._lock = threading.RLock()  # reentrant: SIGTERM's handler may send while the main thread sends
        self._flushing = False  # such a handler only appends: of the bytes before, it cannot know which are sent

    @property
    def unsent(self) -> bool:
        """Whether the buffer holds something."""
        return bool(self._out)

    @property
    def partial(self) -> bool:
        """Whether a message has begun to come and is not complete."""
        return self._frames.partial

    def send(self, *messages: object) -> None:
        with self._lock:
            for message in messages:
                self._out += protocol.frame(message)
        self.flush()

    def flush(self) -> None:
        """Send as much of the buffer as the socket takes now. Whether the other end is gone, `receive` notices."""
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out and not self._flushing:  # again for what a handler has appended at the loop's end
                self._flushing = True
                try:
                    while self._out:
                        # A copy: a handler that runs within `send` could not append to a buffer that is in use.
                        del self._out[: self.socket.send(self._out[:MAX_CHUNK])]
                finally:
                    self._flushing = False

    def receive(self) -> list[Any] | None:
        """The messages that are complete by what one read gives; None: the other end is closed."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        self.received += len(data)
        return self._frames.feed(data) if data else None

    def send_rest(self, seconds: float, *messages: object) -> None:
        """Send the buffer and then these, for so long at most."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.settimeout(seconds)
            self._out += b"".join(map(protocol.frame, messages))
            self._flushing = True
            try:
                rest = bytes(self._out)
                self.socket.sendall(rest)
                del self._out[: len(rest)]
            finally:
                self._flushing = False
