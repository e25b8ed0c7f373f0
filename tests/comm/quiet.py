"""Wakes idle followers a hundred times, then leaves them alone; each tells how fast and how quiet it was.

Each wake-up is followed by a control: a message through a Unix socket to a thread that wakes the main one, as the
watchdog's does, without MPI. It tells what a wake-up takes on this machine beside whatever else runs there.
"""

import json
import queue
import resource
import socket
import sys
import threading
import time

from phalanx.comm import broadcast, mpi, watchdog

WAKES, PAUSE = 100, 0.12  # the pause is longer than QUIET_AFTER
SETTLE, REST = 1.0, 8.0  # seconds: what a plan sets going ends within the first


def used() -> tuple[float, int]:
    """Seconds of processor time, and how often this process was woken from sleep."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return mine.ru_utime + mine.ru_stime, mine.ru_nvcsw


def now() -> bytes:
    return repr(time.time()).encode()


class Control:
    def __init__(self, directory: str, rank: int):
        self._ears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ears.bind(f"{directory}/{rank}")
        self._directory = directory
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def tell(self, ranks: range) -> None:
        for rank in ranks:
            self._ears.sendto(now(), f"{self._directory}/{rank}")

    def begin(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            self._heard.put(self._ears.recv(100))

    def hear(self) -> float:
        """Seconds from the sending of the next message until the main thread has it."""
        sent = self._heard.get()
        return time.time() - float(sent)


def lead(line: broadcast.MpiPlanBroadcast, control: Control) -> None:
    def tell(data: bytes) -> None:
        line.publish(data)
        while line.progress():
            time.sleep(1e-4)

    for _ in range(WAKES):
        time.sleep(PAUSE)  # longer than QUIET_AFTER: the followers sleep
        tell(now())
        time.sleep(PAUSE)  # they wait for the control by then
        control.tell(range(1, world.size))
    tell(b"rest")
    time.sleep(SETTLE + REST)  # what the followers use in so long a rest is what is measured
    tell(b"end")


def follow(line: broadcast.MpiPlanBroadcast, control: Control) -> dict[str, float]:
    wakes, controls = [], []
    for _ in range(WAKES):
        sent = float(line.receive())
        wakes.append(time.time() - sent)
        controls.append(control.hear())
    assert line.receive() == b"rest"
    before = []
    threading.Timer(SETTLE, lambda: before.extend(used())).start()
    assert line.receive() == b"end"
    cpu, woken = used()
    wakes.sort(), controls.sort()
    found = {"cpu": (cpu - before[0]) / REST, "woken": (woken - before[1]) / REST}
    for name, times in ("", wakes), ("control_", controls):
        found |= {f"{name}median": times[WAKES // 2], f"{name}p95": times[WAKES * 95 // 100]}
    return found


world = mpi.join(int(sys.argv[1]))
guard = watchdog.Watchdog(world, ["here"] * world.size, timeout=60)
plans = broadcast.MpiPlanBroadcast(world, guard, range(world.size))
control = Control(sys.argv[2], world.rank)
world.barrier()
guard.started()
if world.rank == 0:
    lead(plans, control)
else:
    control.begin()
    print(json.dumps(follow(plans, control)))
guard.stop()
world.barrier()
mpi.leave()
