"""Wakes idle followers a hundred times, then leaves them alone; each tells how fast and how quiet it was."""

import json
import resource
import sys
import time

from phalanx.comm import control, mpi, watch

WAKES, PAUSE, REST = 100, 0.12, 8.0  # the pause is longer than QUIET_AFTER


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def lead(line: control.MpiControl) -> None:
    def tell(data: bytes) -> None:
        line.publish(data)
        while line.progress():
            time.sleep(1e-4)

    for _ in range(WAKES):
        time.sleep(PAUSE)
        tell(repr(time.time()).encode())
    time.sleep(1)
    tell(b"rest")
    time.sleep(REST)
    tell(b"end")


def follow(line: control.MpiControl, rank: int) -> None:
    wakes, rested, cpu = [], 0.0, 0.0
    while (data := line.receive()) != b"end":
        if data == b"rest":
            rested, cpu = time.monotonic(), cpu_seconds()
        else:
            wakes.append(time.time() - float(data))
    share = (cpu_seconds() - cpu) / (time.monotonic() - rested)
    wakes.sort()
    print(json.dumps({"rank": rank, "median": wakes[WAKES // 2], "p95": wakes[WAKES * 95 // 100], "cpu": share}))


world = mpi.join(int(sys.argv[1]))
guard = watch.Watch(world, ["here"] * world.size, timeout=60)
plans = control.MpiControl(world, guard, range(world.size))
world.barrier()
if world.rank == 0:
    lead(plans)
else:
    follow(plans, world.rank)
guard.stop()
world.barrier()
mpi.leave()
