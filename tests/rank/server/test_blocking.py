"""Work that blocks has threads of its own: the loop and other work go on while a disk hangs."""

from __future__ import annotations

import asyncio
import threading

from phalanx.rank.server.blocking import on_body, on_disk, to_its_end


def test_a_hung_disk_stops_neither_the_loop_nor_the_work_on_bodies():
    hung = threading.Event()

    async def run() -> tuple[int, int, list[str]]:
        waits = [asyncio.ensure_future(on_disk(hung.wait, timeout=30)) for _ in range(64)]
        turns = 0
        for _ in range(10):
            await asyncio.sleep(0)
            turns += 1
        done = await on_body(int, "7")
        early = [str(one) for one in waits if one.done()]
        hung.set()
        assert all(await asyncio.gather(*waits))
        return turns, done, early

    try:
        assert asyncio.run(run()) == (10, 7, [])
    finally:
        hung.set()


def test_the_threads_are_bounded():
    async def run() -> int:
        await asyncio.gather(*(on_disk(threading.Event().wait, 0.01) for _ in range(100)))
        return sum(thread.name.startswith("disk") for thread in threading.enumerate())

    assert 1 <= asyncio.run(run()) <= 8


def test_cancelled_work_is_over_before_its_task_is():
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(30)
        over.set()

    async def run() -> bool:
        task = asyncio.ensure_future(to_its_end(work))
        await on_disk(begun.wait, 30)
        task.cancel()
        await asyncio.sleep(0.05)
        waited = not task.done()
        go_on.set()
        await asyncio.wait([task])
        return waited and task.cancelled() and over.is_set()

    assert asyncio.run(run())
