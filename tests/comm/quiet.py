"""Wakes idle followers a hundred times, then leaves them alone; each tells how fast and how quiet it was."""

import json
import resource
import sys
import time

from phalanx.comm import broadcast, mpi, watchdog

WAKES, PAUSE, REST = 100, 0.12, 8.0  # the pause is longer than QUIET_AFTER


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def lead(line: broadcast.MpiPlanBroadcast) -> None:
    def tell(data: bytes) -> None:
        line.publish(data)
        while line.progress():
            time.sleep(1e-4)

    for _ in range(WAKES):
        time.sleep(PAUSE)  # longer than QUIET_AFTER: the followers sleep
        tell(repr(time.time()).encode())
    time.sleep(1)  # 1 s is enough for what the last wake-up set going to end
    tell(b"rest")
    time.sleep(REST)  # the processor time of so long a rest is what is measured
    tell(b"end")


def follow(line: broadcast.MpiPlanBroadcast, rank: int) -> None:
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
guard = watchdog.Watchdog(world, ["here"] * world.size, timeout=60)
plans = broadcast.MpiPlanBroadcast(world, guard, range(world.size))
world.barrier()
guard.started()
if world.rank == 0:
    lead(plans)
else:
    follow(plans, world.rank)
guard.stop()
world.barrier()
mpi.leave()
