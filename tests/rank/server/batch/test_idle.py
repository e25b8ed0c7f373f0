"""A server's batches take what live requests leave."""

import asyncio
from types import SimpleNamespace

import pytest
from phalanx.rank.protocol import Stats
from phalanx.rank.server.batch import idle

pytestmark = pytest.mark.timeout(10)


class Link(SimpleNamespace):
    """The ranks' statistics that a room reads. `tell`: so many steps since the last call, each so long."""

    def __init__(self):
        ready = SimpleNamespace(max_num_seqs=64)
        super().__init__(state="ready", ready=ready, open_sequences=0, stats=Stats(blocks_total=100))

    def tell(self, room, steps, seconds):
        room._told = asyncio.get_running_loop().time() - steps * seconds
        self.stats = Stats(blocks_total=100, steps=self.stats.steps + steps)


def in_loop(test):
    return lambda: asyncio.run(test())


async def fill(link, room):
    """Take as many as there are; how many that were."""
    count = 0
    while room._has(1):
        link.open_sequences += await room.take(1)
        count += 1
    return count


@in_loop
async def test_more_while_steps_are_short():
    link = Link()
    room = idle.IdleRoom(link)
    assert await fill(link, room) == idle.FIRST
    link.tell(room, 10, 0.02)
    assert await fill(link, room) == 4 and await fill(link, room) == 0
    for most in (8, 16, 16, 0):  # 48 of 64 places are the most
        link.tell(room, 10, 0.02)
        assert await fill(link, room) == most
    room.give(48)
    link.open_sequences = 40  # live ones
    assert await fill(link, room) == 8


@in_loop
async def test_fewer_where_they_are_long():
    link = Link()
    room = idle.IdleRoom(link)
    for _ in range(4):
        await fill(link, room)
        link.tell(room, 10, 0.02)
    assert room._mine == 32 and room._has(1)
    for _ in range(4):
        link.tell(room, 3, 0.5)
        assert not room._has(1)
    room.give(30)
    link.open_sequences = 2
    assert await fill(link, room) == 2


@in_loop
async def test_nothing_while_somebody_waits_or_nobody_answers():
    link = Link()
    room = idle.IdleRoom(link)
    link.open_sequences = 1
    assert room._has(1) and not room._has(10)
    for stats in (Stats(waiting=1, blocks_total=100), Stats(blocks_used=80, blocks_total=100)):
        link.stats = stats
        assert not room._has(1)
    link.stats = Stats(blocks_total=100)
    link.state = "restarting"
    assert not room._has(1)
    link.state, link.open_sequences = "ready", 0
    assert room._has(100)  # a request that wants more than there is has the ranks to itself
