"""Estimates of what still fits, and the room for what is under way."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from phalanx.rank.server.batch.admission import Admission, enough
from phalanx.rank.server.batch.deadline import Deadline
from phalanx.rank.server.schema import ChatRequest, CompletionRequest


def session(tokens, wait=0.5, step=0.1):
    choices = [SimpleNamespace(completion_tokens=1), SimpleNamespace(completion_tokens=tokens)]
    return SimpleNamespace(choices=choices, start=0.0, first_token=wait, last_token=wait + step * (tokens - 1))


def test_nothing_is_known_at_first():
    deadline = Deadline(time.time() + 1)
    assert deadline.seconds(1000) == 0 and deadline.fits(1000)


def test_an_estimate():
    deadline = Deadline()
    deadline.add(session(101))
    assert deadline.seconds(50) == pytest.approx(1.2 * (0.5 + 50 * 0.1))
    assert deadline.seconds(1000) == pytest.approx(1.2 * (0.5 + 1000 * 0.1))  # one length says little
    assert deadline.seconds(None) == pytest.approx(1.2 * (0.5 + 101 * 0.1))
    for tokens in range(10, 110, 10):
        deadline.add(session(tokens))
    assert deadline.seconds(1000) == pytest.approx(1.2 * (0.5 + 100 * 0.1))  # nine of ten are no longer
    assert deadline.seconds(20) == pytest.approx(1.2 * (0.5 + 20 * 0.1))
    assert deadline.fits(1000)


def test_what_fits():
    deadline = Deadline(time.time() + 5)
    deadline.add(session(101))
    assert deadline.fits(30) and not deadline.fits(60)


def test_the_clock_is_set_while_it_runs(monkeypatch):
    now = time.time()
    deadline = Deadline(now + 3600)
    deadline.add(session(101))
    assert deadline.fits(60)
    monkeypatch.setattr(time, "time", lambda: now + 3595)
    assert not deadline.fits(60)
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    assert deadline.fits(60)


def test_answers_of_one_token():
    deadline = Deadline(time.time() + 5)
    deadline.add(session(1))
    assert deadline.seconds(100) == pytest.approx(1.2 * 0.5)


def test_room_is_given_in_turn():
    async def main():
        room = Admission(4)
        order = []

        async def use(name, count):
            taken = await room.take(count)
            order.append(name)
            return taken

        assert await room.take(3) == 3
        big = asyncio.ensure_future(use("big", 9))  # more than there is: all
        small = asyncio.ensure_future(use("small", 1))
        await asyncio.sleep(0)
        assert order == []  # small does not overtake
        room.give(3)
        assert await big == 4
        await asyncio.sleep(0)
        assert order == ["big"]
        room.give(4)
        await small
        assert order == ["big", "small"] and room.free == 3

    asyncio.run(main())


def test_who_gives_up_waiting_holds_nobody_up():
    async def main():
        room = Admission(2)
        await room.take(1)
        big = asyncio.ensure_future(room.take(2))
        small = asyncio.ensure_future(room.take(1))
        await asyncio.sleep(0)
        big.cancel()
        assert await small == 1
        assert room.free == 0
        late = asyncio.ensure_future(room.take(1))
        await asyncio.sleep(0)
        room.give(1)
        late.cancel()  # in the moment that it was given
        await asyncio.wait([late])
        assert room.free == 1

    asyncio.run(main())


def test_how_many_sequences_a_request_is():
    assert ChatRequest(messages="x").sequences() == 1
    assert ChatRequest(messages="x", n=3).sequences() == 3
    assert CompletionRequest(prompt=["a", "b"], n=3).sequences() == 6
    assert CompletionRequest(prompt=[1, 2, 3]).sequences() == 1
    assert enough(8) == 16
