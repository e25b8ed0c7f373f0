"""The watchdog: every rank tells rank 0 how far it is, over a socket of its own that needs neither MPI nor the GPU.

A collective that hangs, or a node that stops without closing its connections, is invisible to the ranks that wait for
it. So a thread in each rank sends its state to rank 0, which judges:

* a rank whose connection closes while the job runs has died;
* a rank that is silent for `timeout` seconds is stuck or cut off;
* when a step is not finished within `timeout`, the ranks that are furthest behind hold the others up;
* when no rank has got on for a long time before the first step, likewise (start.py).

Rank 0 then names rank and host, tells the front through `on_failure`, and ends the process; MPI's own process manager
clears the other ranks. The same sockets wake ranks that sleep between requests (Waker in comm/broadcast.py).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable

from .. import errors
from . import startup
from .base import Comm
from .rendezvous import gather_connections

_STATE = struct.Struct("<cIQQ")  # kind, length of a text that follows, step entered, step finished
_ALIVE, _FAILED, _REFUSED, _BYE, _WAKE = b"a", b"f", b"r", b"b", b"w"  # refused: rank 0 is to say why
_STARTING = b"s"  # alive, and before its first step: phase and how much of it is done stand in the place of steps
_ABORT_PATIENCE = 2.0  # seconds for MPI_Abort, which needs a launcher that listens

Failure = Callable[[str, int], None]


class LocalWatchdog:
    """The watch of a job whose ranks are threads of one process: nothing to connect, a failure ends the process."""

    def __init__(self, rank: int = 0):
        self.rank = rank
        self.entered = 0  # number of the newest step that this rank has begun to execute
        self.finished = 0
        self.poll_device: Callable[[], None] | None = None  # brings `finished` up to date before it is told
        self.on_failure: Failure | None = None
        self.abort: Callable[[int], None] | None = None  # hands the code to a launcher that takes it in no other way
        self._stopping = False
        self._ending = threading.Lock()  # taken for good by whoever tells why the job ends

    def wake(self, ranks: range) -> None: ...

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def divide(self, groups: list[range]) -> None:
        """These groups of ranks execute steps, each at its own pace."""

    def begin(self, phase: str) -> None:
        """Before the first step: what this thread does from now on. All ranks begin the same phases in one order."""

    def reached(self, done: int) -> None:
        """How much of the phase is done: that it changes shows that this rank is not stuck."""

    def started(self) -> None:
        """All ranks are ready for steps."""

    def stop(self) -> None:
        """The job ends in order: connections that close are no failure from now on."""
        self._stopping = True

    def fail(self, error: BaseException) -> None:
        """End the process because of an exception in this rank; does not return."""
        if isinstance(error, errors.FatalError):
            self._last_words(str(error), error.code, _REFUSED)
            self.end(error.code)
        traceback.print_exception(error)
        text, code = f"{type(error).__name__}: {error}", errors.RANK_FAILED
        if errors.lacks_memory(error):
            text, code = f"not enough memory: {errors.first_line(error)} {errors.LESS_MEMORY}", errors.MEMORY
        self._last_words(text, code, _FAILED)
        self.end(code)

    def _last_words(self, text: str, code: int, kind: bytes) -> None:
        self._tell(text, code)

    def _tell(self, text: str, code: int, say: bool = True) -> None:
        """One line on stderr and a word to the front; whoever comes second finds that it was said, and waits."""
        if not self._ending.acquire(blocking=False):
            time.sleep(5)
            return
        if say:
            print(f"phalanx: {text}", file=sys.stderr, flush=True)
        if self.on_failure:
            self.on_failure(text, code)

    def end(self, code: int) -> None:
        """Leave at once: no collective, no destructor, no exit handler can hang here."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self.abort is not None:
            patience = threading.Timer(_ABORT_PATIENCE, os._exit, (code,))
            patience.daemon = True
            patience.start()
            self.abort(code)
        os._exit(code)


class Watchdog(LocalWatchdog):
    """The watch of MPI ranks. Collective over world: made by every rank."""

    def __init__(self, world: Comm, hosts: list[str], timeout: float):
        super().__init__(world.rank)
        self._hosts = hosts
        self._stalls = [_StepStall(range(world.size), timeout)]
        self._start: startup.StartupProgress | None = startup.StartupProgress()
        self._standstill = startup.StallTimer(max(startup.PATIENCE, timeout))
        self._timeout = timeout
        self._period = min(0.5, timeout / 8)
        self._event = threading.Event()
        self._lock = threading.RLock()  # a signal handler may send while the thread that it interrupts does
        self._peers = {
            rank: _Peer(line, self._name(rank)) for rank, line in gather_connections(world, hosts, timeout).items()
        }
        if self.rank:
            self._peers[0].heard += timeout  # which it may spend on meeting the others before it sends anything
        threading.Thread(target=self._guard, name="watch", daemon=True).start()

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    # -- the main and step threads

    def wake(self, ranks: range) -> None:
        """Rank 0: get these ranks to look for a plan now."""
        self._send(_WAKE, [peer for rank, peer in self._peers.items() if rank in ranks])

    def divide(self, groups: list[range]) -> None:
        self._stalls = [_StepStall(ranks, self._timeout) for ranks in groups]

    def begin(self, phase: str) -> None:
        if self._start is not None:
            self._start.begin(phase)

    def reached(self, done: int) -> None:
        if self._start is not None:
            self._start.reached(done)

    def started(self) -> None:
        self._start = None

    def wait(self, seconds: float) -> bool:
        """Sleep for so long, or until woken: True then."""
        woken = self._event.wait(seconds)
        if woken:  # else one that has come since, which the next call has to find
            self._event.clear()
        return woken

    def stop(self) -> None:
        super().stop()
        self._send_all(_BYE)

    def _last_words(self, text: str, code: int, kind: bytes) -> None:
        text = f"{self._name(self.rank)}: {text}"
        if self.rank == 0:
            return self._tell(text, code)
        self._send_all(kind, text.encode()[:2000], code)
        if kind == _REFUSED:
            time.sleep(1)  # all ranks may refuse the same: rank 0 says it once, and its end is ours
        self._tell(text, code)
        time.sleep(0.2)  # rank 0 tells the clients; the process manager ends us all when we exit

    def _send_all(self, kind: bytes, text: bytes = b"", code: int = 0) -> None:
        self._send(kind, self._peers.values(), text, code)

    def _send(self, kind: bytes, peers: Iterable[_Peer], text: bytes = b"", code: int = 0) -> None:
        counts = code if kind in (_FAILED, _REFUSED) else self.entered, self.finished
        self._pass_on(_STATE.pack(kind, len(text), *counts) + text, peers)

    def _pass_on(self, message: bytes, peers: Iterable[_Peer]) -> None:
        with self._lock:
            for peer in peers:
                with contextlib.suppress(OSError):  # a closed connection is judged where it is read
                    peer.connection.send(message, socket.MSG_DONTWAIT)

    def _report(self) -> None:
        """That this rank is alive, and how far it is."""
        if (mine := self._start) is None:
            return self._send_all(_ALIVE)
        doing = mine.look()
        text = f"{doing.name}\n{doing.place}".encode()
        self._pass_on(_STATE.pack(_STARTING, len(text), doing.phase, doing.done) + text, self._peers.values())

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
            if now < due:
                continue
            late = now - due  # this process itself was stopped: nobody's silence can be judged from it
            due = now + self._period
            if self.poll_device is not None:
                with contextlib.suppress(RuntimeError):  # the device has failed: whoever waits for it says so
                    self.poll_device()
            self._report()
            if late > self._timeout / 2:
                self._forgive(now)
            self._judge(now)

    def _forgive(self, now: float) -> None:
        for peer in self._peers.values():
            peer.heard = now
        for standstill in (self._standstill, *self._stalls):
            standstill.forgive(now)

    def _read(self, peer: _Peer) -> bool:
        """Take what the peer sent; False when its connection has closed."""
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
            if kind == _WAKE:
                self._event.set()
            elif kind == _BYE:
                peer.leaving = True
            elif kind in (_FAILED, _REFUSED):
                self._tell(text, entered, say=kind == _REFUSED)
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
            time.sleep(1)  # rank 0 or its process manager says why; this rank only must not outlive them
            self.end(errors.RANK_KILLED)
        self._give_up(f"{peer.name} has died", errors.RANK_KILLED)

    def _judge(self, now: float) -> None:
        if self._stopping:
            return
        silent = [p for p in self._peers.values() if not p.leaving and now - p.heard > self._timeout]
        if silent and (self.rank <= 1):  # rank 1 speaks where rank 0 is the silent one
            names = ", ".join(p.name for p in silent)
            self._give_up(f"{names} did not answer for {self._timeout:g} s", errors.RANK_STUCK)
        if silent:
            time.sleep(1)
            self.end(errors.RANK_STUCK)
        if self.rank == 0:
            self._judge_start(now)
            self._judge_steps(now)

    def _judge_start(self, now: float) -> None:
        everybody = {r: p.doing for r, p in self._peers.items()} | {0: self._start.look() if self._start else None}
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
                f"step {newest} was not finished in {self._timeout:g} s; behind: "
                f"{', '.join(self._name(r) for r in behind)}. If the step is only slow, raise --timeout or lower "
                "--max-num-batched-tokens and --max-num-seqs",
                errors.RANK_STUCK,
            )

    def _give_up(self, text: str, code: int) -> None:
        self._tell(text, code)
        self.end(code)


class _Peer:
    def __init__(self, connection: socket.socket, name: str):
        self.connection = connection
        self.name = name
        self.heard = time.monotonic()
        self.entered = self.finished = 0
        self.doing: startup.StartupState | None = startup.StartupState(0, 0, "starting")  # None: it has started
        self.leaving = False
        self._buffer = b""

    def feed(self, data: bytes) -> list[tuple[bytes, int, int, str]]:
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
    """How long nothing has moved among ranks that have a step to finish."""

    def __init__(self, ranks: range, timeout: float):
        super().__init__(timeout)
        self.ranks = ranks

    def stuck(self, now: float, steps: dict[int, tuple[int, int]]) -> bool:
        """`steps` has what each rank has entered and finished."""
        seen = [steps[rank] for rank in self.ranks if rank in steps]
        done = all(finished == seen[0][0] for _, finished in seen)
        return self.lasts(now, None if done else seen)
