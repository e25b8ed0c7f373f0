"""The control plane's cost by the number of ranks, up to 256, on one small machine.

    python benchmarks/many_ranks.py [--ranks 2 16 64 256] [--parts groups,watchdog,broadcast,steps]

The code is the program's own; links, and the time of a step, are modelled. Prints a table for each part:

groups     every dp x tp x pp x ep of so many ranks, as threads: mesh and control groups are built and checked
watchdog   ranks as threads of one other process, over loopback: connecting, rank 0's idle CPU, descriptors, a wake-up
           of all ranks, and how soon a rank's death and its silence are noticed
broadcast  plans down a binomial tree. Each rank passes a plan on when it polls, with the sleeps of comm/broadcast.py
steps      rank 0 schedules --dp replicas. The time that its code takes is measured (CPU time of the thread), the rest
           is a modelled clock: links, steps of Llama-3.1-8B on one H200 (docs/measurements/models.md), polls of MPI

docs/measurements/many-ranks.md has the figures and says what they foretell.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from phalanx import logs
from phalanx.comm import broadcast, mesh, threads
from phalanx.comm.watchdog import Watchdog
from phalanx.launcher.commands.bench.run import many_files
from phalanx.rank import heap, protocol
from phalanx.rank.options import degrees
from phalanx.rank.scheduler.blocks import Blocks
from phalanx.rank.scheduler.loop import StepLoop
from phalanx.rank.scheduler.replica import Replica
from phalanx.rank.scheduler.scheduler import Scheduler
from phalanx.rank.scheduler.step import ScheduledStep

HOP = 5e-6  # seconds of a small message between two nodes, and
BANDWIDTH = 10e9  # bytes/s of a link
SEND = 1e-6  # seconds of rank 0 for each message that it sends
LAUNCH = 1e-3  # seconds of a follower for a step, between two looks for plans
POLL = 6e-6  # seconds of a look at one replica's sends and results in MPI: `poll_cost` measures it
# Step times of Llama-3.1-8B in bf16 on one H200: seconds of a decode step by its sequences, and of a prompt's token.
DECODE = {1: 3.98e-3, 16: 4.24e-3, 64: 4.98e-3, 256: 9.86e-3}
PREFILL = 22e-6


def tree(ranks: int, size: int) -> float:
    """Seconds of a broadcast in which no rank has to be waited for."""
    return math.ceil(math.log2(ranks)) * (HOP + size / BANDWIDTH) if ranks > 1 else 0.0


def table(head: list[str], rows: Iterator[list[Any]]) -> None:
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(format(x, '.3g') if isinstance(x, float) else str(x) for x in row)} |", flush=True)
    print()


# -- groups


class Layout(NamedTuple):
    dp: int
    tp: int
    pp: int
    ep: int


def layouts(ranks: int) -> list[Layout]:
    """All of so many ranks, in powers of two."""
    powers = [1 << i for i in range(ranks.bit_length())]
    sizes = itertools.product(powers, powers, powers)
    found = [(dp, tp, pp) for dp, tp, pp in sizes if dp * tp * pp == ranks]
    return [Layout(dp, tp, pp, ep) for dp, tp, pp in found for ep in powers if ep <= tp]


class Place(NamedTuple):
    """A rank's own place, with members as ranks of the world."""

    replica: int
    tensor: list[int]
    pipe: list[int]
    stage: int
    control: dict[int, list[int]]


def place(world: threads.ThreadComm, layout: Layout) -> Place:
    grid = mesh.build(world, layout.tp, layout.pp, ep=layout.ep)
    groups = mesh.control_groups(world, layout.dp)
    control = {replica: group.exchange(world.rank) for replica, group in groups.items()}  # type: ignore[attr-defined]
    tensor, pipe = (group.exchange(world.rank) for group in (grid.tensor, grid.pipe))  # type: ignore[attr-defined]
    return Place(grid.replica, tensor, pipe, grid.stage, control)


def check(layout: Layout, places: list[Place]) -> None:
    """Each rank is in one tensor group of neighbours, in one pipeline, and in its replica's control group, which rank 0
    leads; rank 0 is in the last stage."""
    ranks, each = len(places), layout.tp * layout.pp
    assert degrees(ranks, layout.tp, layout.pp, layout.dp, layout.ep) == (layout.tp, layout.pp, layout.dp)
    for rank, found in enumerate(places):
        first = rank // each * each
        assert found.replica == rank // each
        assert found.tensor == list(range(rank // layout.tp * layout.tp, (rank // layout.tp + 1) * layout.tp))
        assert found.pipe == sorted(range(first + rank % layout.tp, first + each, layout.tp), reverse=True)
        assert found.pipe[found.stage] == rank
        own = list(range(first, first + each))
        assert found.control[found.replica] == ([0, *own] if first else own)
        assert len(found.control) == (layout.dp if rank == 0 else 1)
    assert places[0].stage == layout.pp - 1


def groups(counts: list[int]) -> None:
    def row(ranks: int) -> list[Any]:
        built: dict[Layout, float] = {}
        for layout in layouts(ranks):
            began = time.perf_counter()
            check(layout, threads.run(partial(place, layout=layout), ranks))
            built[layout] = time.perf_counter() - began
        slowest = max(built, key=lambda one: built[one])
        name = " x ".join(f"{key} {n}" for key, n in slowest._asdict().items())
        return [ranks, len(built), statistics.median(built.values()), built[slowest], name]

    print("groups: all layouts build, and are as they should be")
    table(["ranks", "layouts", "s each, median", "slowest", "which"], map(row, counts))


# -- watchdog


class Told:
    """A rank's world while it makes its watchdog: it hears one broadcast of bytes."""

    def __init__(self, rank: int, size: int, line: Connection, data: bytes = b""):
        self.rank, self.size, self._line, self._data = rank, size, line, data

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        if self.rank == 0:
            if x.dtype == torch.uint8:
                self._line.send(x.numpy().tobytes())
        elif x.dtype == torch.uint8:
            x.copy_(torch.frombuffer(bytearray(self._data), dtype=torch.uint8))
        else:
            x.fill_(len(self._data))
        return x


def end(self: Watchdog, code: int) -> None:
    raise SystemExit(code)  # in place of the process its thread ends


def others(size: int, timeout: float, line: Connection) -> None:
    """The process with all ranks but rank 0."""
    data = line.recv()
    hosts = [f"node-{rank // 4}" for rank in range(size)]
    watches = [Watchdog(Told(r, size, line, data), hosts[:1] * size, timeout) for r in range(1, size)]  # type: ignore[arg-type]
    for watch in watches:
        watch.started()
    line.send(time.monotonic())
    began = time.process_time()
    while (command := line.recv()) != "end":
        if command == "cpu":
            line.send((time.process_time() - began) / len(watches))
            began = time.process_time()
        elif command == "woken":
            while not all(watch._event.is_set() for watch in watches):
                time.sleep(1e-4)
            line.send(time.monotonic())
        elif command == "die":
            line.send(time.monotonic())
            watches[-1]._peers[0].connection.shutdown(2)
        elif command == "silence":
            line.send(time.monotonic())
            watches[-1]._send_heartbeat = lambda: None  # type: ignore[method-assign]
    os._exit(0)


@contextlib.contextmanager
def watched(size: int, timeout: float) -> Iterator[tuple[Watchdog, Connection, float]]:
    """Rank 0's watchdog, the way to the others' process, and the seconds until all were connected."""
    line, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=others, args=(size, timeout, far), daemon=True)
    process.start()
    began = time.monotonic()
    try:
        watch = Watchdog(Told(0, size, line), ["node-0"] * size, timeout)  # type: ignore[arg-type]
        watch.started()
        yield watch, line, line.recv() - began
        watch.stop()
        with contextlib.suppress(OSError):
            line.send("end")
        process.join(10)
    finally:
        process.kill()
        process.join()


def noticed(size: int, timeout: float, command: str) -> float:
    """Seconds until rank 0 ends the job after the last rank has died, or went silent."""
    with watched(size, timeout) as (watch, line, _):
        failed = threading.Event()
        when = []
        watch.on_failure = lambda text, code: (when.append(time.monotonic()), failed.set())  # type: ignore[assignment,func-returns-value]
        time.sleep(2.0)
        line.send(command)
        began = line.recv()
        assert failed.wait(timeout + 30)
        return when[0] - began


def watchdog(counts: list[int], idle: float) -> None:
    def row(ranks: int) -> list[Any]:
        with watched(ranks, 120) as (watch, line, connected):
            line.send("cpu")
            line.recv()
            before, start = time.process_time(), time.monotonic()
            time.sleep(idle)
            mine = (time.process_time() - before) / (time.monotonic() - start)
            line.send("cpu")
            theirs = line.recv() / idle
            files = len(os.listdir("/proc/self/fd"))
            line.send("woken")
            time.sleep(0.1)
            began = time.monotonic()
            watch.wake(range(ranks))
            woken = line.recv() - began
        dead, silent = noticed(ranks, 120, "die"), noticed(ranks, 4, "silence")
        beats = (ranks - 1) * 2 * 2
        return [ranks, connected, files, beats, 100 * mine, 100 * theirs, 1e3 * woken, 1e3 * dead, silent]

    print("watchdog: over loopback, --timeout 120; silence with --timeout 4")
    head = ["ranks", "s to connect", "descriptors", "heartbeats/s", "rank 0: % of a core", "another: % of a core",
            "ms until all are woken", "ms until a death is noticed", "s until silence is"]  # fmt: skip
    with mock.patch.object(Watchdog, "end", end), mock.patch.object(logs, "say", lambda *_: None):
        table(head, map(row, counts))


# -- broadcast


class Clock:
    """Stands in for the module `time` in comm/broadcast.py."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 55e-6  # timers are late by that, Linux' usual slack


class Line:
    """A rank's communicator and waker in the modelled tree: `arrivals[k]` is when plan k is there, `passed[k]` when
    this rank has looked and so passed it on."""

    def __init__(self, clock: Clock, arrivals: list[float], plan: bytes):
        self.clock, self.arrivals, self.plan = clock, arrivals, plan
        self.passed: list[float] = []
        self.handle, self.rank, self.size = self, 0, 1
        self._buffer = np.zeros(0, np.uint8)

    def Dup(self) -> Line:
        return self

    def Ibcast(self, buffer: np.ndarray, root: int) -> Line:
        self._buffer = buffer
        return self

    def Test(self) -> bool:
        if self.clock.now < self.arrivals[len(self.passed)]:
            return False
        self._buffer[:4].view("<u4")[0] = len(self.plan)
        self.passed.append(self.clock.now)
        return True

    def wait(self, seconds: float) -> bool:
        """A waker's delay: rank 0 wakes its followers just before a plan that comes after a pause."""
        due = self.arrivals[len(self.passed)]
        woken = due <= self.clock.now + seconds
        self.clock.now = max(self.clock.now, due) + 1e-4 if woken else self.clock.now + seconds
        return woken

    def wake(self, ranks: range) -> None: ...


def delays(ranks: int, step: float, plans: int, size: int = 3000) -> list[float]:
    """Seconds from each plan's publication until the last rank has it, with a plan every `step` seconds."""
    dice = random.Random(ranks)
    published = [k * step + dice.random() * 0.1 * step for k in range(plans)]
    passed = {0: published}
    plan = bytes(size)
    for rank in range(1, ranks):
        top = 1 << (rank.bit_length() - 1)
        parent = rank - top
        # The children of a parent: itself and the powers of two above it; it sends to the farthest ones first.
        turn = math.ceil(math.log2(ranks)) - top.bit_length() + 1
        arrivals = [t + turn * SEND + HOP + size / BANDWIDTH for t in passed[parent]]
        clock = Clock()
        clock.now = -dice.random() * step
        line = Line(clock, arrivals, plan)
        with mock.patch.object(broadcast, "time", clock):
            control = broadcast.MpiPlanBroadcast(line, line, range(ranks))
            for _ in range(plans):
                control.receive()
                clock.now += LAUNCH
        passed[rank] = line.passed
    return [max(times) - published[k] for k, times in enumerate(zip(*passed.values(), strict=True))][8:]


def broadcasts(counts: list[int]) -> None:
    steps = (4e-3, 10e-3, 30e-3)

    def row(ranks: int) -> list[Any]:
        found: list[Any] = [ranks, 1e6 * tree(ranks, 3000)]
        for step in steps:
            late = sorted(delays(ranks, step, 100))
            found += [f"{1e3 * statistics.median(late):.2f}, {1e3 * late[-1]:.2f}"]
        return found

    print("broadcast: a plan of 3000 bytes; ms until the last rank has it, median and longest of 92")
    head = ["ranks", "µs if nobody sleeps", *(f"steps of {1e3 * step:g} ms" for step in steps)]
    table(head, map(row, counts))


# -- steps


class VirtualClock:
    """CPU time of this thread, and the modelled time in which it waits."""

    def __init__(self) -> None:
        self._start, self.waited = time.thread_time(), 0.0

    @property
    def busy(self) -> float:
        return time.thread_time() - self._start

    @property
    def now(self) -> float:
        return self.busy + self.waited

    def until(self, when: float) -> None:
        self.waited += max(0.0, when - self.now)


class Future:
    """A step on modelled ranks."""

    def __init__(self, executor: Ranks, ends: float, count: int):
        self.executor, self.ends, self.count = executor, ends, count

    def wait(self, seconds: float | None) -> bool:
        clock = self.executor.clock
        clock.waited += POLL
        clock.until(self.ends if seconds is None else min(self.ends, clock.now + seconds))
        return clock.now >= self.ends

    def output(self) -> protocol.StepOutput:
        return protocol.StepOutput(np.random.default_rng(0).integers(10, 4000, self.count, np.uint32).tobytes())


class Planner(Scheduler):
    """Remembers its last step, from which the ranks know how many rows sample."""

    last: ScheduledStep

    def schedule(self) -> ScheduledStep | None:
        found = super().schedule()
        if found is not None:
            self.last = found
        return found


class Ranks:
    """The executor of a replica whose ranks are modelled."""

    def __init__(self, clock: VirtualClock, scheduler: Planner, ranks: int):
        self.clock, self.scheduler, self.ranks = clock, scheduler, ranks
        self.free = 0.0  # when the device has nothing to do
        self.computing = 0.0  # seconds so far
        self.sizes: list[int] = []

    def start(self, plan: protocol.Plan) -> Future:
        data = protocol.encode_plan(plan)
        self.sizes.append(len(data))
        self.clock.waited += SEND * math.ceil(math.log2(self.ranks + 1))
        counts = protocol.unpack_u32(plan.counts)
        seconds = float(np.interp(len(plan.rows) // 2, [*DECODE], [*DECODE.values()])) + PREFILL * sum(counts)
        begins = max(self.free, self.clock.now + tree(self.ranks, len(data)))
        self.free = begins + seconds
        self.computing += seconds
        return Future(self, self.free + HOP, len(self.scheduler.last.sampled))

    def mask(self, masks: protocol.Masks) -> None: ...

    def progress(self) -> bool:
        self.clock.waited += POLL
        return False

    def counters(self) -> dict[str, int]:
        return {}


class Over(Exception):
    pass


class Clients:
    """In place of the socket to the server process: as many clients as rows, who ask again at once."""

    signalled = False

    def __init__(self, clients: int, over: Any):
        self.over = over
        self.dice = random.Random(0)
        self.count = self.tokens = 0
        self.waiting = [self.request() for _ in range(clients)]

    def request(self) -> protocol.Request:
        self.count += 1
        prompt = np.frombuffer(self.dice.randbytes(4 * 128), np.uint32) % 4000
        sampling = protocol.SamplingParams(max_tokens=self.dice.randint(64, 320))
        return protocol.Request(str(self.count), prompt.tobytes(), sampling)

    def receive(self, seconds: float | None) -> list[Any]:
        if self.over():
            raise Over
        asked, self.waiting = self.waiting, []
        return asked

    def send(self, message: Any) -> None:
        for delta in getattr(message, "deltas", ()):
            self.tokens += len(delta.tokens)
            if delta.finish:
                self.waiting.append(self.request())


def steps(replicas: int, rows: int, each: int, many: int) -> list[Any]:
    """Schedules so many steps of each replica, after as many to warm up."""
    heap.collect()  # as a rank does before it serves
    clock = VirtualClock()
    planners = [Planner(Blocks(rows * 40, 16), rows, 8192, 1024) for _ in range(replicas)]
    ranks = [Ranks(clock, planner, each) for planner in planners]
    marks: list[tuple[float, float, float, int]] = []

    def over() -> bool:
        done = sum(len(one.sizes) for one in ranks)
        if done >= many * replicas * (len(marks) + 1):
            marks.append((clock.now, clock.busy, sum(one.computing for one in ranks), clients.tokens))
        return len(marks) == 2

    clients = Clients(0, over)
    clients.waiting = [clients.request() for _ in range(rows * replicas)]
    loop = StepLoop([Replica(*pair) for pair in zip(planners, ranks, strict=True)], clients)  # type: ignore[arg-type]
    with contextlib.suppress(Over):
        loop.run()
    now, busy, computing, tokens = (after - before for before, after in zip(*marks, strict=True))
    sizes = sorted(size for one in ranks for size in one.sizes[-many:])
    return [
        replicas, replicas * each, rows, sizes[len(sizes) // 2], sizes[-1], 1e6 * busy / (many * replicas),
        100 * busy / now, 100 * computing / now / replicas, tokens / now,
    ]  # fmt: skip


def poll_cost() -> float:
    """Seconds of one look at a replica's sends and results, as MPI has them here; POLL is that on a quiet machine."""
    from phalanx.comm import mpi

    world = mpi.join(0)
    control = broadcast.MpiPlanBroadcast(world, Line(Clock(), [], b""), range(0))
    control.publish(bytes(100))
    began = time.thread_time()
    for _ in range(2000):
        control.progress()
        world.handle.Improbe(0)  # as MpiResultChannel.collect does
    found = (time.thread_time() - began) / 2000
    mpi.leave()
    return found


def scheduling(replicas: list[int], rows: list[int], each: int, many: int) -> None:
    print(f"steps: replicas of {each} rank(s); a look at a replica's messages takes {1e6 * poll_cost():.2g} µs here, "
          f"{1e6 * POLL:g} are assumed")  # fmt: skip
    head = ["replicas", "ranks", "sequences of each", "plan bytes, median", "largest", "rank 0: CPU µs a step",
            "rank 0: % of a core", "devices busy %", "tokens/s"]  # fmt: skip
    table(head, (steps(dp, count, each, many) for count in rows for dp in replicas))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 16, 64, 256])
    parser.add_argument("--parts", default="groups,watchdog,broadcast,steps")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds in which idle CPU is measured (5)")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256], help="sequences of a replica (16 256)")
    parser.add_argument("--each", type=int, default=1, help="ranks of a replica (1)")
    parser.add_argument("--steps", type=int, default=40, help="of each replica that are measured (40)")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    parts = asked.parts.split(",")
    if unknown := set(parts) - {"groups", "watchdog", "broadcast", "steps"}:
        parser.error(f"--parts {','.join(sorted(unknown))}: expected groups, watchdog, broadcast, steps")
    with many_files():
        if "watchdog" in parts:  # first: it forks
            watchdog(asked.ranks, asked.idle)
        if "groups" in parts:
            groups(asked.ranks)
        if "broadcast" in parts:
            broadcasts(asked.ranks)
        if "steps" in parts:
            dp = sorted({max(1, count // asked.each) for count in asked.ranks})
            scheduling(dp, asked.rows, asked.each, asked.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
