"""The server process's end of the wire to rank 0: requests go out, deltas come in, and either side may go away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable

from ... import errors, linux_calls
from .. import protocol
from .api_error import ApiError

log = logging.getLogger(__name__)
AGAIN = "send the request again"
STOPPING = f"the server is stopping; {AGAIN}"
GRACE = 3.0  # seconds
RETRY_AFTER = 5  # seconds; loading a model takes longer, but asking is cheap


class Stream:
    """A stream of what the scheduler sends for the sequences of one submit.

    Iterating yields lists of deltas: all that came since the last look, so a reader that was held up catches up in
    one round. It ends when every sequence has finished, and raises ApiError when the scheduler is lost.
    """

    __slots__ = ("open", "_link", "_pending", "_waiter", "_error")

    def __init__(self, link: EngineClient, ids: list[str]):
        self.open = dict.fromkeys(ids)  # of the sequences that have not finished, in order
        self._link = link
        self._pending: list[protocol.Delta] = []
        self._waiter: asyncio.Future | None = None
        self._error: ApiError | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[protocol.Delta]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self.open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        return pending

    def push(self, delta: protocol.Delta) -> None:
        self._pending.append(delta)
        if delta.finish:
            self.open.pop(delta.id, None)
        self._wake()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._wake()

    def abort(self, ids: list[str] | None = None) -> None:
        """End these sequences, all by default: nothing more is yielded for them."""
        chosen = [id for id in (self.open if ids is None else ids) if id in self.open]
        for id in chosen:
            del self.open[id]
        if ids is None:
            self._pending.clear()
        self._link.abort(chosen)
        if not self.open:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Listens for rank 0's scheduler and speaks the frames of rank/protocol.py with it.

    Everything here runs on one asyncio loop. The states: "loading" (no scheduler yet, or its weights are not loaded),
    "ready", "unloaded" (no model is loaded), "draining", "restarting" (the scheduler is gone, and another is expected)
    and "failed" (gone for good).
    """

    def __init__(self, path: str, restarts_expected: bool = False, timeout: float = 0.0):
        """timeout: seconds of silence after which rank 0 is killed; heartbeats tell it the same of us. 0: neither."""
        self.path = path
        self._timeout = timeout
        self._next_heartbeat: asyncio.TimerHandle | None = None
        self.restarts_expected = restarts_expected
        self.state = "loading"
        self.progress = protocol.Progress("starting", 0, 0)
        self.ready: protocol.Ready | None = None
        self.stats = protocol.Stats()
        self.fatal: protocol.Fatal | None = None
        self.draining = False
        self.asleep = False  # the model is unloaded until it is woken
        self.switch_error = ""  # of the last switch
        self._drain = protocol.Drain()
        self.on_lost: Callable[[], None] = lambda: None
        self.on_draining: Callable[[], None] = self.drain  # the ranks were asked to; whoever is here says when
        self._ready_event = asyncio.Event()  # set while `ready` is there, or will never be
        self._switched = asyncio.Event()  # the ranks have done what the last `switch` asked, or will never do it
        self._streams: dict[str, Stream] = {}
        self._vocabulary: protocol.Vocabulary | None = None  # the one that the scheduler knows
        self._busy_at = 0.0  # on the loop's clock: when something was last running, or could not run
        self._scheduler: _EngineProtocol | None = None
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Open the unix socket, readable by this user only."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(self.path)
        except OSError as error:
            sock.close()
            raise OSError(
                f"cannot listen for rank 0 on {self.path!r} ({len(self.path)} characters, "
                f"at most 107 are possible): {error}"
            ) from None
        os.chmod(self.path, 0o600)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _EngineProtocol(self), sock=sock)
        if self._timeout:
            self._exchange_heartbeats(loop.time())

    def _exchange_heartbeats(self, due: float) -> None:
        """Send one now, and the next after a while; kill rank 0 where its own stay away. due: when this should run.

        Of several ranks the others give rank 0 up GRACE seconds earlier, and know its name and host.
        """
        loop = asyncio.get_running_loop()
        now, rank = loop.time(), self._scheduler
        if rank is not None:
            rank.transport.write(protocol.frame(protocol.Heartbeat()))
            if now - due > self._timeout / 2:  # this process was stopped: the silence of others means nothing
                rank.heard = now
            elif rank.watched and now - rank.heard > self._timeout + GRACE:
                rank.watched = False
                why = f"rank 0 (pid {rank.pid}) did not answer for {now - rank.heard:.0f} s and was killed"
                log.error("phalanx: %s", why)
                self.fatal = protocol.Fatal(why, errors.RANK_STUCK)
                if rank.pid > 0:  # 0: in another container's namespace of process ids; os.kill(0) ends our own group
                    with contextlib.suppress(OSError):  # its end of the socket is open, so the id is still its own
                        os.kill(rank.pid, signal.SIGKILL)
        due = now + protocol.heartbeat_period(self._timeout)
        self._next_heartbeat = loop.call_at(due, self._exchange_heartbeats, due)

    def close(self) -> None:
        """Stop listening, drop the scheduler and fail what is open."""
        if self._next_heartbeat is not None:
            self._next_heartbeat.cancel()
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            self._server = None
        if self._scheduler is not None:
            self._scheduler.transport.close()
        self.fail_all(STOPPING)

    async def wait_ready(self) -> protocol.Ready:
        """Wait for the scheduler's Ready."""
        while self.ready is None:
            if self.state == "failed":
                raise self.unavailable()
            await self._ready_event.wait()
        return self.ready

    @property
    def open_sequences(self) -> int:
        return len(self._streams)

    def idle_seconds(self) -> float:
        """For how long the ranks have had nothing to do although they could. Who asks does so every second or so."""
        now = asyncio.get_running_loop().time()
        if self._streams or self.state not in ("ready", "unloaded"):
            self._busy_at = now
        return now - self._busy_at

    def submit(self, requests: list[protocol.Request], vocabulary: protocol.Vocabulary | None = None) -> Stream:
        """Send requests to the scheduler. vocabulary: of those that have a grammar.

        Raises ApiError 503 where there is none that takes them.
        """
        if self.state != "ready" or self._scheduler is None:
            raise self.unavailable()
        stream = Stream(self, [request.id for request in requests])
        for request in requests:
            self._streams[request.id] = stream
        self._busy_at = asyncio.get_running_loop().time()
        frames = [protocol.frame(request) for request in requests]
        if vocabulary is not None and vocabulary is not self._vocabulary:
            self._vocabulary = vocabulary
            frames.insert(0, protocol.frame(vocabulary))
        # One frame is not joined, which would copy it: images are megabytes.
        self._scheduler.transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        return stream

    def abort(self, ids: list[str]) -> None:
        """Free these sequences on the ranks; unknown and finished ones are left out."""
        known = [id for id in ids if self._streams.pop(id, None) is not None]
        if known and self._scheduler is not None:
            self._scheduler.transport.write(protocol.frame(protocol.Abort(known)))
        if known:
            self._say_drained()

    async def switch(self, model: int, options: str, weights: str = "") -> str:
        """Have the ranks serve another model; "" for `options`: none. Call it when nothing is open. weights: as of
        protocol.Switch.

        Returns why it could not be loaded, where it could not. Raises ApiError where the job has ended.
        """
        if self._scheduler is None or self.draining:
            raise self.unavailable()
        self.state, self.ready, self.switch_error = "loading", None, ""
        self.progress = protocol.Progress("switching models", 0, 0)
        self._ready_event.clear()
        self._switched.clear()
        self._vocabulary = None  # the scheduler forgets it with the model
        self._scheduler.transport.write(protocol.frame(protocol.Switch(model, options, weights)))
        await self._switched.wait()
        if self.state not in ("ready", "unloaded"):
            raise self.unavailable()
        return self.switch_error

    def drain(self, code: int = errors.OK) -> None:
        """Take no new request; the scheduler finishes the open ones, and the ranks end with `code`."""
        if self.draining:
            return
        self.draining = True
        count = len(set(self._streams.values()))
        log.info("draining: open requests: %d%s", count, ", which may take as long as they need" if count else "")
        self._drain = protocol.Drain(code)
        if self.state in ("loading", "ready", "unloaded"):
            self.state = "draining"
        if self._scheduler is not None:
            self._scheduler.transport.write(protocol.frame(self._drain))

    def _say_drained(self) -> None:
        if self.draining and not self._streams:
            log.info("drained: no request is open any more")

    def unavailable(self) -> ApiError:
        """Why no request is taken now."""
        return self._unavailable().not_taken()

    def _unavailable(self) -> ApiError:
        if self.asleep and self.state in ("unloaded", "loading"):
            return ApiError(503, "the model sleeps until /wake_up", code="sleeping", retry_after=RETRY_AFTER)
        if self.state == "loading":
            p = self.progress
            done = f", {p.done} of {p.total}" if p.total else ""
            return ApiError(
                503,
                f"the model is still loading ({p.phase}{done}); try again in a few seconds",
                code="loading",
                retry_after=RETRY_AFTER,
            )
        if self.state == "draining":
            return ApiError(
                503, "the server is shutting down and takes no new requests", code="draining", retry_after=RETRY_AFTER
            )
        if self.state == "unloaded":
            return ApiError(503, "no model is loaded; try again", code="unloaded", retry_after=1)
        reason = f": {self.fatal.message}" if self.fatal else ""
        if self.state == "restarting":
            return ApiError(
                503,
                f"the job ended{reason}; it is being restarted, try again in a few seconds",
                code="restarting",
                retry_after=RETRY_AFTER,
            )
        return ApiError(503, f"the job ended{reason}", code="failed")

    def give_up(self, message: str) -> None:
        """End every open sequence with an error, on the ranks too."""
        ids = list(self._streams)
        self.fail_all(message, "draining", 1)
        if ids and self._scheduler is not None:
            self._scheduler.transport.write(protocol.frame(protocol.Abort(ids)))

    def fail_all(self, message: str, code: str = "failed", retry_after: int | None = None) -> None:
        """Every open sequence ends with this error, which allows the client to send the request again."""
        message = message if "again" in message else f"{message}; {AGAIN}"
        streams = dict.fromkeys(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(ApiError(503, message, code=code, retry_after=retry_after))

    # Called by _EngineProtocol.

    def connected(self, scheduler: _EngineProtocol) -> None:
        if self._scheduler is not None:
            if not self.restarts_expected:
                log.warning("refused a second connection on %s: rank 0 is connected already", self.path)
                scheduler.transport.abort()
                return
            # A restarted scheduler may be accepted before the end of the old one's connection is read.
            old, self._scheduler = self._scheduler, None
            old.transport.abort()
            self.lost()
        self._scheduler = scheduler
        self.fatal = None
        self.state = "draining" if self.draining else "loading"
        self.progress = protocol.Progress("starting", 0, 0)
        if self.draining:
            scheduler.transport.write(protocol.frame(self._drain))

    def disconnected(self, scheduler: _EngineProtocol) -> None:
        if scheduler is self._scheduler:
            self._scheduler = None
            self.lost()

    def lost(self) -> None:
        self.ready = None
        self.asleep = False  # ranks that start anew load the model
        self._ready_event.clear()
        self.stats = protocol.Stats()
        restarting = self.restarts_expected and not self.draining
        self.state = "restarting" if restarting else "failed"
        error = self.unavailable()
        self.fail_all(error.message, error.code or "failed", error.retry_after)
        if self.state == "failed":
            self._ready_event.set()  # who waits for Ready waits in vain
            self._switched.set()
        self.on_lost()

    def received(self, message: protocol.ToServer) -> None:
        if isinstance(message, protocol.Heartbeat):
            if self._scheduler is not None:
                self._scheduler.watched = True
        elif isinstance(message, protocol.Deltas):
            streams = self._streams
            for delta in message.deltas:
                # Sequences that were aborted a moment ago may still speak.
                stream = streams.get(delta.id)
                if stream is not None:
                    if delta.finish:
                        del streams[delta.id]
                    stream.push(delta)
                    self._say_drained()
            if message.stats is not None:
                self.stats = message.stats
        elif isinstance(message, protocol.Progress):
            self.progress = message
        elif isinstance(message, protocol.Ready):
            self.ready = message
            self._vocabulary = None
            if not self.draining:
                self.state = "ready"
            self._ready_event.set()
            self._switched.set()
        elif isinstance(message, protocol.Draining):
            self.on_draining()
        elif isinstance(message, protocol.Unloaded):
            if not self.draining:
                self.state = "unloaded"
            self._switched.set()
        elif isinstance(message, protocol.SwitchFailed):
            self.switch_error = message.message  # the model from before follows
        else:
            self.fatal = message
            log.debug("the job is ending with exit code %d: %s", message.code, message.message)  # the rank has said so
            self.fail_all(
                f"the job ended: {message.message}", retry_after=RETRY_AFTER if self.restarts_expected else None
            )


class _EngineProtocol(asyncio.Protocol):
    """One connection of a scheduler."""

    transport: asyncio.Transport

    def __init__(self, link: EngineClient):
        self._link = link
        self._frames = protocol.Frames(protocol.ToServer)
        self._accepted = False
        self.pid = 0  # of rank 0
        self.watched = False  # it sends heartbeats
        self.heard = 0.0  # on the loop's clock: when something came

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.pid, uid = linux_calls.peer(transport.get_extra_info("socket"))
        if uid != os.getuid():
            log.warning(
                "refused a connection of user %d on %s: only user %d's job may connect",
                uid,
                self._link.path,
                os.getuid(),
            )
            transport.abort()
            return
        self._accepted = True
        self._link.connected(self)

    def data_received(self, data: bytes) -> None:
        if not self._accepted:
            return
        self.heard = asyncio.get_running_loop().time()
        try:
            messages = self._frames.feed(data)
        except Exception as error:  # not our protocol: nothing after it can be trusted
            log.error("dropped the connection to rank 0: it sent what is no message (%s)", error)
            self.transport.abort()
            return
        for message in messages:
            self._link.received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._accepted:
            self._link.disconnected(self)
