"""Model of barrier.cuh and of allreduce_norm.cu's LL protocol, access by access, under a scheduler out for trouble.

Every thread of every block of every rank is a generator that stops before each access to memory. What a rank stores is
seen by the others later, each store on its own and in any order, as the memory model allows: only two stores to the
same place keep their order, and a release is seen after what its block stored before the last barrier, what its thread
stored and what kernels before it stored. A rank's next kernel begins when all blocks of the last one have ended. FLAWS
are simpler protocols.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

Steps = Generator[Callable[[], bool] | None, None, Any]
MAIL_FLAWS = (
    "one LL buffer", "one word is looked at", "zeros are sent", "nothing is cleared", "cleared before it is used again",
)  # fmt: skip
FLAWS = (
    "one slot", "compared by ==", "relaxed flags", "only used blocks count", "no barrier before the flag",
    "no barrier after the flag", "no first barrier", "count of calls chooses no slot", "no barrier",
    "shares of other blocks' rows", *MAIL_FLAWS,
)  # fmt: skip
WRAP = 1 << 32
ROW = 5  # vectors of a row
WORD = 1 << 20  # a vector that is sent is two words of less


class Wrong(Exception):
    """A rank has a wrong sum, or none can go on."""


class Group:
    """The ranks' memory, as each of them sees it: views[rank][owner, name, index ...]."""

    def __init__(self, size: int, blocks: int, threads: int, rng: random.Random, start: int = 0, flaw: str = ""):
        assert flaw in ("", *FLAWS)
        self.size, self.blocks, self.threads, self.rng, self.flaw = size, blocks, threads, rng, flaw
        self.start = start % WRAP
        self.views: list[dict[tuple, Any]] = [{} for _ in range(size)]
        self.ahead: list[list[tuple]] = [[] for _ in range(size)]  # stores that a rank does not see yet
        self.stores = 0
        # Stores of each rank's kernels: of those that have ended, and of the running one.
        self.of_ended: list[set[int]] = [set() for _ in range(size)]
        self.of_running: list[set[int]] = [set() for _ in range(size)]

    def load(self, rank: int, place: tuple) -> Any:
        return self.views[rank].get(place, {"slot": None, "ll": 0, "recv": -1}.get(place[1], self.start))

    def store(self, rank: int, place: tuple, value: Any, after: frozenset[int]) -> int:
        """after: the numbers of stores that others have to see first."""
        self.stores += 1
        for other in range(self.size):
            if other == rank:
                self.views[rank][place] = value
            else:
                self.ahead[other].append((self.stores, place, value, after))
        return self.stores

    def arrive(self) -> bool:
        """Let some rank see some store; False if there is none."""
        waiting = [rank for rank in range(self.size) if self.ahead[rank]]
        if not waiting:
            return False
        rank = self.rng.choice(waiting)
        queue = self.ahead[rank]
        numbers = {number for number, *_ in queue}
        free, places = [], set()
        for i, (_, place, _, after) in enumerate(queue):
            if place not in places and not after & numbers:
                free.append(i)
            places.add(place)
        _, place, value, _ = queue.pop(self.rng.choice(free))
        self.views[rank][place] = value
        return True


class Block:
    def __init__(self, group: Group, rank: int, index: int, grid: int, x: list[int]):
        self.group, self.rank, self.index, self.grid, self.x = group, rank, index, grid, x
        self.waiting, self.passed = 0, 0
        self.stored: set[int] = set()
        self.synchronised: frozenset[int] = frozenset()


class Thread:
    def __init__(self, block: Block, index: int):
        self.block, self.index, self.group, self.rank = block, index, block.group, block.rank
        self.own: set[int] = set()

    def load(self, *place: Any) -> Steps:
        yield None
        return self.group.load(self.rank, place)

    def store(self, value: Any, *place: Any, release: bool = False) -> Steps:
        yield None
        before = frozenset(self.group.of_ended[self.rank])
        after = frozenset(self.own | self.block.synchronised) | before if release else frozenset()
        number = self.group.store(self.rank, place, value, after)
        self.own.add(number)
        self.block.stored.add(number)
        self.group.of_running[self.rank].add(number)

    def syncthreads(self) -> Steps:
        yield None
        block = self.block
        block.waiting += 1
        if block.waiting == self.group.threads:
            block.waiting, block.passed = 0, block.passed + 1
            block.synchronised = frozenset(block.stored)
        else:
            turn = block.passed
            yield lambda: block.passed > turn

    def begin(self) -> Steps:
        self.before = yield from self.load(self.rank, "count", self.block.index)
        self.slot = self.before // 2 % 2
        if self.group.flaw == "one slot":
            self.slot = 0
        if self.group.flaw == "count of calls chooses no slot":
            self.slot = self.before % 2

    def barrier(self, step: int) -> Steps:
        flaw = self.group.flaw
        if flaw == "no barrier" or (flaw == "no first barrier" and step == 1):
            return
        if flaw != "no barrier before the flag":
            yield from self.syncthreads()
        yield from self.tell(step)
        yield from self.await_(step)
        if flaw != "no barrier after the flag":
            yield from self.syncthreads()

    def tell(self, step: int) -> Steps:
        if self.index < self.group.size:
            there = (self.index, "arrived", self.block.index, self.rank)
            now = (self.before + step) % WRAP
            yield from self.store(now, *there, release=self.group.flaw != "relaxed flags")

    def await_(self, step: int) -> Steps:
        here = (self.rank, "arrived", self.block.index, self.index)

        def arrived() -> bool:
            ahead = (self.group.load(self.rank, here) - self.before - step) % WRAP
            return ahead == 0 if self.group.flaw == "compared by ==" else ahead <= 3

        if self.index < self.group.size:
            yield arrived

    def send(self, value: int, *place: Any) -> Steps:
        zero = 0 if self.group.flaw == "zeros are sent" else 1
        words = [value // WORD + zero, value % WORD + zero]
        for i in self.group.rng.sample(range(2), 2):
            yield from self.store(words[i], *place, i)

    def receive(self, *place: Any) -> Steps:
        """The data sent to this place, once it is there."""
        looked_at = range(1 if self.group.flaw == "one word is looked at" else 2)
        yield lambda: all(self.group.load(self.rank, (*place, i)) for i in looked_at)
        words = []
        for i in range(2):
            words.append((yield from self.load(*place, i)))
        return (words[0] - 1) * WORD + words[1] - 1

    def clear(self, *place: Any) -> Steps:
        for i in range(2):
            yield from self.store(0, *place, i)

    def end(self) -> Steps:
        last = self.block.index + 1 if self.group.flaw == "only used blocks count" else self.group.blocks
        first, step = self.block.index + self.index * self.block.grid, self.block.grid * self.group.threads
        for i in range(first, last, step):
            yield from self.store((self.before + 2) % WRAP, self.rank, "count", i)

    def total(self, at: int) -> Steps:
        values = []
        for rank in range(self.group.size):
            values.append((yield from self.load(rank, "slot", self.slot, at)))
        return sum(values) if None not in values else -1

    def own_share(self, count: int) -> range:
        threads = self.group.threads
        return range(self.block.index * threads + self.index, count, self.block.grid * threads)

    def one_shot(self) -> Steps:
        x = self.block.x
        yield from self.begin()
        for i in self.own_share(len(x)):
            yield from self.store(x[i], self.rank, "slot", self.slot, i)
        yield from self.barrier(2)
        for i in self.own_share(len(x)):
            x[i] = yield from self.total(i)
        yield from self.end()

    def two_shot(self) -> Steps:
        x, size = self.block.x, self.group.size
        share = len(x) // size
        yield from self.begin()
        for i in self.own_share(share):
            for r in range(size):
                yield from self.store(x[r * share + i], self.rank, "slot", self.slot, r * share + i)
        yield from self.barrier(1)
        for i in self.own_share(share):
            at = self.rank * share + i
            sum_ = yield from self.total(at)
            yield from self.store(sum_, self.rank, "slot", self.slot, at)
        yield from self.barrier(2)
        for i in self.own_share(share):
            for r in range(size):
                x[r * share + i] = yield from self.load(r, "slot", self.slot, r * share + i)
        yield from self.end()

    def two_shot_add_norm(self) -> Steps:
        """Without the norm. Rows of ROW, of which each rank adds up a share."""
        x, size, block, threads = self.block.x, self.group.size, self.block, self.group.threads
        rows, share = range(block.index, len(x) // ROW, block.grid), -(-ROW // size)
        yield from self.begin()
        for i in range(self.index, len(rows) * ROW, threads):
            at = rows[i // ROW] * ROW + i % ROW
            yield from self.store(x[at], self.rank, "slot", self.slot, at)
        yield from self.barrier(1)
        first, width = self.rank * share, max(min(share, ROW - self.rank * share), 0)
        if self.group.flaw == "shares of other blocks' rows":
            rows = range((block.index + 1) % block.grid, len(x) // ROW, block.grid)
        sums = {}
        for i in range(self.index, len(rows) * width, threads):
            at = rows[i // width] * ROW + first + i % width
            sums[at] = yield from self.total(at)
        for at, sum_ in sums.items():  # the kernel stores some before it loads others
            yield from self.store(sum_, self.rank, "slot", self.slot, at)
        yield from self.barrier(2)
        for row in range(block.index, len(x) // ROW, block.grid):
            for i in range(self.index, ROW, threads):
                x[row * ROW + i] = yield from self.load(i // share, "slot", self.slot, row * ROW + i)
        yield from self.end()

    def gemm(self) -> Steps:
        """A kernel of the library's: each rank's part of a row goes to the rank that adds it up."""
        x, size = self.block.x, self.group.size
        share = -(-ROW // size)
        for at in self.own_share(len(x)):
            row, i = divmod(at, ROW)
            yield from self.store(x[at], i // share, "recv", row, i, self.rank)

    def received_add_norm(self) -> Steps:
        """Without the norm: sums of what the GEMMs before have sent, as two_shot_add_norm's."""
        x, size, block, threads = self.block.x, self.group.size, self.block, self.group.threads
        rows, share = range(block.index, len(x) // ROW, block.grid), -(-ROW // size)
        first, width = self.rank * share, max(min(share, ROW - self.rank * share), 0)
        yield from self.begin()
        yield from self.barrier(1)
        for i in range(self.index, len(rows) * width, threads):
            row, column = rows[i // width], first + i % width
            sum_ = 0
            for r in range(size):
                sum_ += yield from self.load(self.rank, "recv", row, column, r)
            yield from self.store(sum_, self.rank, "slot", self.slot, row * ROW + column)
        yield from self.barrier(2)
        for row in rows:
            for i in range(self.index, ROW, threads):
                x[row * ROW + i] = yield from self.load(i // share, "slot", self.slot, row * ROW + i)
        yield from self.end()

    def push_add_norm(self) -> Steps:
        """Without the norm. Rows of ROW, of which each rank adds up a share."""
        x, size, block, threads, flaw = self.block.x, self.group.size, self.block, self.group.threads, self.group.flaw
        rows, share = range(block.index, len(x) // ROW, block.grid), -(-ROW // size)
        yield from self.begin()
        if flaw == "one LL buffer":
            self.slot = 0
        yield from self.tell(2)
        others = [(self.rank + 1 + j) % size for j in range(size)]
        first, width = self.rank * share, max(min(share, ROW - self.rank * share), 0)
        received = [
            (self.rank, "ll", self.slot, "share", rows[i // width], i % width, r)
            for i in range(self.index, len(rows) * width, threads)
            for r in range(size)
        ]
        summed = [(self.rank, "ll", self.slot, "sum", row, i) for row in rows for i in range(self.index, ROW, threads)]
        if flaw == "cleared before it is used again":
            for place in received + summed:
                yield from self.clear(*place)
        for i in range(self.index, len(rows) * share, threads):
            row, column = rows[i // share], i % share
            for r in others:
                if r * share + column < ROW:
                    at = row * ROW + r * share + column
                    yield from self.send(x[at], r, "ll", self.slot, "share", row, column, self.rank)
        for i in range(0, len(received), size):
            sum_ = 0
            for place in received[i : i + size]:
                sum_ += yield from self.receive(*place)
            _, _, _, _, row, column, _ = received[i]
            for r in others:
                yield from self.send(sum_, r, "ll", self.slot, "sum", row, first + column)
            if "cleared" not in flaw:
                for place in received[i : i + size]:
                    yield from self.clear(*place)
        yield from self.await_(2)
        for place in summed:
            _, _, _, _, row, i = place
            x[row * ROW + i] = yield from self.receive(*place)
            if "cleared" not in flaw:
                yield from self.clear(*place)
        yield from self.syncthreads()
        yield from self.end()

    def one_way_push_add_norm(self) -> Steps:
        """Without the norm. Rows of ROW, of which every rank gets everything."""
        x, block, threads, flaw = self.block.x, self.block, self.group.threads, self.group.flaw
        rows = range(block.index, len(x) // ROW, block.grid)
        yield from self.begin()
        if flaw == "one LL buffer":
            self.slot = 0
        yield from self.tell(2)
        others = [r for r in range(self.group.size) if r != self.rank]
        places = [(row, i) for row in rows for i in range(self.index, ROW, threads)]
        if flaw == "cleared before it is used again":
            for place in places:
                for r in others:
                    yield from self.clear(self.rank, "ll", self.slot, "all", r, *place)
        for i in range(self.index, len(rows) * ROW, threads):
            row, column = rows[i // ROW], i % ROW
            for r in others:
                yield from self.send(x[row * ROW + column], r, "ll", self.slot, "all", self.rank, row, column)
        sums = [x[row * ROW + i] for row, i in places]
        for at, (row, i) in enumerate(places):
            for r in others:
                place = (self.rank, "ll", self.slot, "all", r, row, i)
                sums[at] += yield from self.receive(*place)
                if "cleared" not in flaw:
                    yield from self.clear(*place)
        yield from self.syncthreads()  # other threads may have sent what this one overwrites
        for (row, i), sum_ in zip(places, sums, strict=True):
            x[row * ROW + i] = sum_
        yield from self.await_(2)
        yield from self.end()


def run(group: Group, calls: list[tuple[str, int, int]]) -> None:
    """Every rank makes the same calls: name, grid, and how many elements. Raises Wrong where a sum is, or all wait.

    The call after a GEMM is of the same elements.
    """
    rng = group.rng
    value = lambda: rng.choice([0, rng.randrange(WORD), rng.randrange(1 << 40)])  # noqa: E731
    inputs = [[[value() for _ in range(count)] for _, _, count in calls] for _ in range(group.size)]
    for of_rank in inputs:
        for i, (name, _, _) in enumerate(calls):
            if name == "gemm":
                of_rank[i + 1] = of_rank[i]
    want = [[sum(column) for column in zip(*parts, strict=True)] for parts in zip(*inputs, strict=True)]
    todo = [0] * group.size  # each rank's next call
    running: list[list[list]] = [[] for _ in range(group.size)]  # each rank's threads: generator, what it waits for

    def launch(rank: int) -> None:
        name, grid, _ = calls[todo[rank]]
        for i in range(grid):
            block = Block(group, rank, i, grid, inputs[rank][todo[rank]])
            running[rank] += [[getattr(Thread(block, t), name)(), None] for t in range(group.threads)]
        todo[rank] += 1

    while any(running) or min(todo) < len(calls):
        favoured = [rng.random() ** 3 for _ in range(group.size)]  # for a while some ranks are much faster
        arrivals = rng.random() ** 3
        for _ in range(rng.randrange(1, 120)):
            if rng.random() < arrivals and group.arrive():
                continue
            ready = []
            for rank in range(group.size):
                if not running[rank] and todo[rank] < len(calls):
                    launch(rank)
                ready += [(rank, thread) for thread in running[rank] if thread[1] is None or thread[1]()]
            if not ready:
                if any(running) and not group.arrive():
                    raise Wrong(f"all wait in the calls {todo}")
                continue
            rank, thread = rng.choices(ready, [favoured[rank] + 1e-6 for rank, _ in ready])[0]
            try:
                thread[1] = next(thread[0])
            except StopIteration:
                running[rank].remove(thread)
                if running[rank]:
                    continue
                done = todo[rank] - 1
                group.of_ended[rank] |= group.of_running[rank]
                group.of_running[rank] = set()
                if calls[done][0] != "gemm" and inputs[rank][done] != want[done]:
                    raise Wrong(f"rank {rank} has a wrong sum in call {done}") from None
