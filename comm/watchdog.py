"""The watchdog ends a job with a rank that has died or hangs. Its sockets need neither MPI nor the GPU.

Ranks that wait in a collective cannot see that it hangs, or that a node has stopped without closing its connections.
So a thread in each rank sends its progress to rank 0. Rank 0 ends the job in four cases:

* a rank's connection closes while the job runs: the rank has died;
* a rank sends nothing for `timeout` seconds: it is stuck or cut off;
* a step is not finished within `timeout`, or PREDICTED_FACTOR times the longest step's predicted time where that is
  more: the ranks that are furthest behind are named;
* no rank makes progress for a long time before the first step: likewise (startup.py).

Rank 0 then prints rank and host, tells the server through `on_failure`, and ends its process. MPI's process manager
ends the other ranks. The same sockets wake ranks that sleep between requests (Waker in comm/broadcast.py).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

from .. import errors, logs
from . import startup
from .base import Comm
from .rendezvous import gather_connections

_STATE = struct.Struct("<cIQQ")  # kind, length of the text that follows, step entered, step finished
_ALIVE, _FAILED, _REFUSED, _BYE, _WAKE = b"a", b"f", b"r", b"b", b"w"  # refused: rank 0 prints the reason
_STARTING = b"s"  # alive before the first step; has phase and progress in place of steps
# Times the longest step that is predicted: tokens may all choose the same experts, machines get busy.
PREDICTED_FACTOR = 3.0
_ABORT_PATIENCE = 2.0  # seconds for MPI_Abort, which hangs if the launcher does not answer

Failure = Callable[[str, int], None]


class LocalWatchdog:
    """The watchdog of a job in one process, whose ranks may be threads. It has no connections."""

    def __init__(self, rank: int = 0):
        self.rank = rank
        self.entered = 0  # the newest step that this rank has begun to execute
        self.finished = 0  # the newest step that it has finished
        self.poll_device: Callable[[], None] | None = None  # updates `finished` before it is sent
        self.on_failure: Failure | None = None
        self.abort: Callable[[int], None] | None = (
            None  # MPI_Abort, for launchers that take the exit code in no other way
        )
        self._stopping = False
        self._ending = threading.Lock()  # acquired, and never released, by the thread that announces why the job ends

    def wake(self, ranks: range) -> None: ...

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def divide(self, groups: list[range]) -> None:
        """Time the steps of each of these groups (replicas) on its own."""

    def expect(self, seconds: float) -> float:
        """The longest step is predicted to take so long; 0: no prediction. Returns for how long a step may take, or 0
        where no thread looks."""
        return 0.0

    def begin(self, phase: str) -> None:
        """Begin a phase of loading in this thread. All ranks begin the same phases in the same order."""

    def reached(self, done: int) -> None:
        """Report progress within the phase; any change shows that this rank is not stuck."""

    def started(self) -> None:
        """End startup: all ranks are ready for steps."""

    def stop(self) -> None:
        """The job ends normally: connections that close are no failure from now on."""
        self._stopping = True

    def fail(self, error: BaseException) -> None:
        """End the process because of an exception in this rank. Does not return."""
        if isinstance(error, errors.FatalError):
            self._report_failure(str(error), error.code, _REFUSED)
            self.end(error.code)
        logs.say_traceback(error)
        text, code = f"{type(error).__name__}: {error}", errors.RANK_FAILED
        if errors.lacks_memory(error):
            text, code = f"not enough memory: {errors.first_line(error)} {errors.LESS_MEMORY}", errors.MEMORY
        self._report_failure(text, code, _FAILED)
        self.end(code)

    def _report_failure(self, text: str, code: int, kind: bytes) -> None:
        self._announce(text, code)

    def _announce(self, text: str, code: int, say: bool = True) -> None:
        """Print one line and tell the server. A second caller prints nothing; it waits for the end of the process."""
        if not self._ending.acquire(blocking=False):
            time.sleep(5)
            return
        if say:
            logs.say(text, "error")
        if self.on_failure:
            self.on_failure(text, code)

    def end(self, code: int) -> None:
        """Exit at once, without collectives, destructors or exit handlers, any of which may hang."""
        logs.flush()
        if self.abort is not None:
            patience = threading.Timer(_ABORT_PATIENCE, os._exit, (code,))
            patience.daemon = True
            patience.start()
            self.abort(code)
        os._exit(code)


class Watchdog(LocalWatchdog):
    """The watchdog of MPI ranks. Collective over world: every rank makes one."""

    def __init__(self, world: Comm, hosts: list[str], timeout: float):
        super().__init__(world.rank)
        self._hosts = hosts
        self._stalls = [_StepStall(range(world.size), timeout)]
        self._start: startup.StartupProgress | None = startup.StartupProgress()
        self._standstill = startup.StallTimer(max(startup.PATIENCE, timeout))
        self._timeout = timeout  # of a rank's silence
        # Between rank 0's heartbeats. The others answer each at once, so that one wake-up reads and sends; where none
        # comes, they send theirs after one and a half periods.
        self._period = min(0.5, timeout / 8)
        self._called = False  # rank 0's heartbeat is still to be answered
        self._event = threading.Event()
        self._lock = threading.RLock()  # reentrant: a signal handler may send while the thread that it interrupts does
        self._peers = {
            rank: _Peer(line, self._name(rank)) for rank, line in gather_connections(world, hosts, timeout).items()
        }
        if self.rank:
            self._peers[0].heard += timeout  # rank 0 sends nothing before all ranks have connected
        threading.Thread(target=self._guard, name="watch", daemon=True).start()

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    # -- the main and step threads

    def wake(self, ranks: range) -> None:
        """Rank 0: make these ranks poll for a plan now."""
        self._send(_WAKE, [self._peers[rank] for rank in ranks if rank in self._peers])

    def divide(self, groups: list[range]) -> None:
        self._stalls = [_StepStall(ranks, self._timeout) for ranks in groups]

    def expect(self, seconds: float) -> float:
        patience = max(self._timeout, PREDICTED_FACTOR * seconds)
        for stall in self._stalls:
            stall.limit = patience
        return patience

    def begin(self, phase: str) -> None:
        if self._start is None:  # another model is loaded
            self._start = startup.StartupProgress()
        self._start.begin(phase)

    def reached(self, done: int) -> None:
        if self._start is not None:
            self._start.reached(done)

    def started(self) -> None:
        self._start = None

    def wait(self, seconds: float) -> bool:
        """Sleep for so many seconds or until woken. Returns whether it was woken."""
        woken = self._event.wait(seconds)
        if woken:  # only then: a wake-up that came after the timeout is for the next call
            self._event.clear()
        return woken

    def stop(self) -> None:
        super().stop()
        self._send_all(_BYE)

    def _report_failure(self, text: str, code: int, kind: bytes) -> None:
        text = f"{self._name(self.rank)}: {text}"
        if self.rank == 0:
            return self._announce(text, code)
        self._send_all(kind, text.encode()[:2000], code)
        if kind == _REFUSED:
            time.sleep(5)  # all ranks may refuse: let rank 0 print it once and end the job
        self._announce(text, code)
        time.sleep(0.2)  # let rank 0 tell the clients: our exit makes the process manager end all ranks

    def _send_all(self, kind: bytes, text: bytes = b"", code: int = 0) -> None:
        self._send(kind, self._peers.values(), text, code)

    def _send(self, kind: bytes, peers: Iterable[_Peer], text: bytes = b"", code: int = 0) -> None:
        counts = code if kind in (_FAILED, _REFUSED) else self.entered, self.finished
        self._send_message(_STATE.pack(kind, len(text), *counts) + text, peers)

    def _send_message(self, message: bytes, peers: Iterable[_Peer]) -> None:
        with self._lock:
            for peer in peers:
                with contextlib.suppress(OSError):  # a closed connection is handled where it is read
                    peer.connection.send(message, socket.MSG_DONTWAIT)

    def _send_heartbeat(self) -> None:
        """Send that this rank is alive, with its progress."""
        if (mine := self._start) is None:
            return self._send_all(_ALIVE)
        doing = mine.look()
        text = f"{doing.name}\n{doing.place}".encode()
        self._send_message(_STATE.pack(_STARTING, len(text), doing.phase, doing.done) + text, self._peers.values())

    # -- the guard thread

    def _guard(self) -> None:
        selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(peer.connection, selectors.EVENT_READ, peer)
        due = time.monotonic()
        while True:
            for key, _ in selector.select(max(0.0, due - time.monotonic())):
                if not self._read(key.data):
                    selector.unregister(key.data.connection)
            now = time.monotonic()
            if self._called:
                due, self._called = min(due, now), False
            if now < due:
                continue
            late = now - due  # if this process was stopped, silence of others means nothing
            due = now + self._period * (1.5 if self.rank else 1)
            if self.poll_device is not None:
                with contextlib.suppress(
                    RuntimeError
                ):  # the device has failed: the thread that waits for it reports that
                    self.poll_device()
            self._send_heartbeat()
            if late > self._timeout / 2:
                self._forgive(now)
            self._judge(now)

    def _forgive(self, now: float) -> None:
        for peer in self._peers.values():
            peer.heard = now
        for standstill in (self._standstill, *self._stalls):
            standstill.forgive(now)

    def _read(self, peer: _Peer) -> bool:
        """Handle what the peer sent; False when its connection has closed."""
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self._closed(peer)
            return False
        peer.heard = time.monotonic()
        for kind, entered, finished, text in peer.feed(data):
            self._called |= self.rank > 0 and kind in (_ALIVE, _STARTING)
            if kind == _WAKE:
                self._event.set()
            elif kind == _BYE:
                peer.leaving = True
            elif kind in (_FAILED, _REFUSED):
                self._announce(text, entered, say=kind == _REFUSED)
                self.end(entered)
            elif kind == _STARTING:
                peer.doing = startup.StartupState(entered, finished, *text.split("\n"))
            else:
                peer.entered, peer.finished, peer.doing = entered, finished, None
        return True

    def _closed(self, peer: _Peer) -> None:
        if self._stopping or peer.leaving:
            return
        if self.rank:
            time.sleep(1)  # rank 0 or the process manager prints the reason first
            self.end(errors.RANK_KILLED)
        self._give_up(f"{peer.name} has died", errors.RANK_KILLED)

    def _judge(self, now: float) -> None:
        if self._stopping:
            return
        silent = [p for p in self._peers.values() if not p.leaving and now - p.heard > self._timeout]
        if silent and (self.rank <= 1):  # rank 1 prints where rank 0 is silent
            names = ", ".join(p.name for p in silent)
            self._give_up(f"{names} did not answer for {self._timeout:g} s", errors.RANK_STUCK)
        if silent:
            time.sleep(1)
            self.end(errors.RANK_STUCK)
        if self.rank == 0:
            self._judge_start(now)
            self._judge_steps(now)

    def _judge_start(self, now: float) -> None:
        mine = self._start  # the main thread may take it away meanwhile
        everybody = {r: p.doing for r, p in self._peers.items()} | {0: mine.look() if mine else None}
        ranks = {r: doing for r, doing in everybody.items() if doing is not None}
        if not self._standstill.lasts(now, {r: d[:2] for r, d in ranks.items()} or None):
            return
        behind = ", ".join(f"{self._name(r)}, {ranks[r]}" for r in sorted(startup.laggards(ranks)))
        limit = self._standstill.limit
        self._give_up(
            f"no rank has got on with starting for {limit:g} s; behind: {behind}. If that is only slow, raise "
            f"--timeout above {limit:g}",
            errors.RANK_STUCK,
        )

    def _judge_steps(self, now: float) -> None:
        steps = {0: (self.entered, self.finished)} | {r: (p.entered, p.finished) for r, p in self._peers.items()}
        for stall in self._stalls:
            if not stall.stuck(now, steps):
                continue
            newest = max(steps[r][0] for r in stall.ranks)
            behind = [r for r in stall.ranks if steps[r][0] < newest]
            behind = behind or [r for r in stall.ranks if r and steps[r][1] < newest] or [0]
            self._give_up(
                f"step {newest} was not finished in {round(stall.limit, 1):g} s; behind: "
                f"{', '.join(self._name(r) for r in behind)}. If the step is only slow, raise --timeout or lower "
                "--max-num-batched-tokens and --max-num-seqs",
                errors.RANK_STUCK,
            )

    def _give_up(self, text: str, code: int) -> None:
        self._announce(text, code)
        self.end(code)


class _Peer:
    """A peer's connection and its last reported progress."""

    def __init__(self, connection: socket.socket, name: str):
        self.connection = connection
        self.name = name
        self.heard = time.monotonic()
        self.entered = self.finished = 0
        self.doing: startup.StartupState | None = startup.StartupState(0, 0, "starting")  # None: it has started
        self.leaving = False
        self._buffer = b""

    def feed(self, data: bytes) -> list[tuple[bytes, int, int, str]]:
        """The complete messages so far, as (kind, entered, finished, text)."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _STATE.size:
            kind, length, entered, finished = _STATE.unpack_from(self._buffer)
            end = _STATE.size + length
            if len(self._buffer) < end:
                break
            messages.append((kind, entered, finished, self._buffer[_STATE.size : end].decode(errors="replace")))
            self._buffer = self._buffer[end:]
        return messages


class _StepStall(startup.StallTimer):
    """Measures how long no rank of a group has made progress on an unfinished step."""

    def __init__(self, ranks: range, timeout: float):
        super().__init__(timeout)
        self.ranks = ranks

    def stuck(self, now: float, steps: dict[int, tuple[int, int]]) -> bool:
        """steps: what each rank has entered and finished."""
        seen = [steps[rank] for rank in self.ranks if rank in steps]
        done = all(finished == seen[0][0] for _, finished in seen)
        return self.lasts(now, None if done else seen)
