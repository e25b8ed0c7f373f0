"""Whose turn it is: order, fairness and what ends a wait, with a job that switches at once."""

import asyncio
from types import SimpleNamespace

import pytest
from phalanx.rank import protocol
from phalanx.rank.server import models
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.config import ServerConfig
from phalanx.rank.server.models import Models

NAMES = ("a", "b", "c")


class Link:
    """The job: loads at once, unless a model is in `broken`."""

    def __init__(self, broken):
        self.state, self.draining, self.open_sequences = "ready", False, 0
        self.broken = broken
        self.loads = []
        self._load(0)

    def _load(self, model):
        self.ready = protocol.Ready(
            max_model_len=8, vocab_size=8, kv_tokens=8, block_size=8, max_num_seqs=8, ranks=1, model=model
        )

    async def switch(self, model, options):
        self.loads.append(options)
        self.state = "loading"
        await asyncio.sleep(0.01)  # loading takes a while: others run meanwhile
        self.state = "ready" if options else "unloaded"
        if not options:
            self.ready = None
        elif options not in self.broken:
            self._load(model)
        return "no weights" if options in self.broken else ""

    def unavailable(self):
        return ApiError(503, f"the job is {self.state}")


def played(script, broken=(), **config):
    """Run a coroutine function with Models and its link."""

    async def run():
        async def load(): ...

        engines = [
            SimpleNamespace(model=i, options=name, names=[name], text=None, load=load) for i, name in enumerate(NAMES)
        ]
        found = Models(engines, Link(broken), ServerConfig(model_dir="", link="", listen_fd=-1, **config))
        found.start()
        try:
            async with asyncio.timeout(20):
                await script(found)
        finally:
            found.close()

    asyncio.run(run())


def enter(turns, name, order=None):
    async def one():
        await turns.enter(turns.named(name))
        if order is not None:
            order.append(name)

    return asyncio.ensure_future(one())


def test_requests_of_other_models_wait_in_their_order():
    async def script(turns):
        order = []
        await enter(turns, "a")
        waits = [enter(turns, name, order) for name in "bcb"]
        await asyncio.sleep(0.05)  # time for all three to ask, and to be let in if that were wrong
        assert not order and turns.loaded == 0
        assert [(one["id"], one["waiting"], one["running"]) for one in turns.describe()] == [
            ("a", 0, 1), ("b", 2, 0), ("c", 1, 0),
        ]  # fmt: skip
        turns.leave()
        await asyncio.gather(waits[0], waits[2])
        assert order == ["b", "b"] and turns.loaded == 1  # all that wait for it have its turn
        turns.leave()
        turns.leave()
        await waits[1]
        assert turns.link.loads == ["b", "c"]

    played(script)


def test_the_running_model_takes_new_requests_until_another_has_waited_long(monkeypatch):
    monkeypatch.setattr(models, "PATIENCE", 0.2)

    async def script(turns):
        order = []
        await enter(turns, "a")
        other = enter(turns, "b", order)
        await asyncio.sleep(0)
        await enter(turns, "a", order)
        await asyncio.sleep(0.25)  # longer than the 0.2 s that the other waits at most
        late = enter(turns, "a", order)
        await asyncio.sleep(0.1)  # time to be let in, which it must not be
        assert order == ["a"]
        turns.leave()
        turns.leave()
        await other
        turns.leave()
        await late
        assert order == ["a", "b", "a"]
        assert turns.link.loads == ["b", "a"]

    played(script)


def test_sequences_without_a_request_hold_the_model():
    async def script(turns):
        turns.link.open_sequences = 1  # a response in the background
        other = enter(turns, "b")
        await asyncio.sleep(0.2)  # time to switch in, which must not happen
        assert not other.done()
        turns.link.open_sequences = 0
        await other

    played(script)


def test_what_goes_on_in_the_background_holds_the_model():
    async def script(turns):
        await enter(turns, "a")
        release = turns.hold()
        turns.leave()  # the request is answered
        other = enter(turns, "b")
        await asyncio.sleep(0.2)  # time to switch in, which must not happen while it is held
        assert not other.done()
        release(None)
        await other

    played(script)


def test_a_model_that_cannot_be_loaded():
    async def script(turns):
        waits = [enter(turns, name) for name in "bbc"]
        for wait in waits[:2]:
            with pytest.raises(ApiError, match="model b .*no weights") as told:
                await wait
            assert (told.value.status, told.value.code) == (503, "model_load_failed")
        await waits[2]
        assert turns.status(turns.named("b")) == "failed" and turns.status(turns.named("c")) == "loaded"
        turns.link.broken = ()
        turns.leave()
        await enter(turns, "b")
        assert turns.status(turns.named("b")) == "loaded"

    played(script, broken=("b",))


@pytest.mark.parametrize("kind", [ValueError, Exception])  # tokenizers raises bare ones
def test_a_tokenizer_that_cannot_be_read(kind):
    async def script(turns):
        async def load():
            raise kind("no JSON")

        turns.named("b").load = load
        with pytest.raises(ApiError, match="tokenizer .*no JSON"):
            await enter(turns, "b")
        assert turns.link.loads == [] and turns.loaded == 0
        await enter(turns, "c")  # others still get their turns

    played(script)


def test_who_leaves_while_waiting_holds_nothing():
    async def script(turns):
        await enter(turns, "a")
        gone, stays = enter(turns, "b"), enter(turns, "c")
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        turns.leave()
        await stays
        assert turns.link.loads == ["c"] and turns.describe()[2]["running"] == 1

    played(script)


def test_the_queue_is_bounded_and_ends():
    async def script(turns):
        await enter(turns, "a")
        waits = [enter(turns, "b") for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as told:
            await enter(turns, "b")
        assert told.value.status == 429
        turns.close()
        for wait in waits:
            with pytest.raises(ApiError, match="stopping"):
                await wait

    played(script, queue_size=2)


def test_names():
    async def script(turns):
        assert turns.named(None).names == ["a"]
        with pytest.raises(ApiError, match="'d'.*a, b, c"):
            turns.named("d")
        turns.link.state = "failed"
        with pytest.raises(ApiError, match="the job is failed"):
            await turns.enter(turns.named("a"))

    played(script)


def test_an_idle_model_is_unloaded():
    async def script(turns):
        await enter(turns, "a")
        await asyncio.sleep(0.5)  # longer than a model may be idle here
        assert turns.loaded == 0 and turns.link.loads == []  # somebody uses it
        turns.leave()
        while turns.loaded is not None:
            await asyncio.sleep(0.01)
        assert turns.link.loads == [""] and turns.status(turns.named("a")) == "unloaded"
        await enter(turns, "a")
        assert turns.link.loads == ["", "a"]

    played(script, idle_unload=0.2)


def test_the_first_model_is_loading_while_the_ranks_start():
    async def script(turns):
        for state in ("loading", "restarting"):
            turns.link.state = state
            assert [turns.status(one) for one in turns.engines] == ["loading", "unloaded", "unloaded"]
        turns.link.state = "ready"
        assert turns.status(turns.named("a")) == "loaded"

    played(script)
