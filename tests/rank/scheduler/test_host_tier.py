"""Blocks that fall out of the pool go to host memory and come back; the toy ranks' tokens show whether it was they."""

import random

import pytest
from phalanx.rank import protocol
from phalanx.rank.scheduler.blocks import IN_HOST, Blocks
from phalanx.rank.scheduler.host_tier import HostTier

from .toy import Engine, alone, check_random_requests, request


def pool(blocks=3, host=4, least=1):
    """A pool whose blocks have all been cached once, as a..., and are free."""
    made = Blocks(blocks, 1, tier=HostTier(host, least))
    for name in (b"a", b"b", b"c"):
        (block,) = made.allocate(1)
        made.cache(block, name)
        made.free([block])
    return made


def test_an_evicted_block_is_copied_out_and_comes_back():
    blocks = pool(blocks=2)  # a was evicted for c
    assert blocks.match([b"a", b"c"]).tables[0] == [IN_HOST, 0]
    assert blocks.match([b"x"]).tables[0] == []
    assert blocks.num_unreferenced([IN_HOST, 0]) == 2
    assert blocks.hold(blocks.match([b"a", b"c"]), [b"a", b"c"]) == [[1, 0]]
    out, back = blocks.tier.take_copies()
    assert out == bytes([0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0])  # block 0 to 0, then 1 to 1
    assert back == bytes([0, 0, 0, 0, 1, 0, 0, 0]) and blocks.tier.take_copies() == (b"", b"")
    assert blocks.match([b"a", b"b"]).tables[0] == [1, IN_HOST]
    blocks.check([[1, 0]])


def test_a_block_that_is_in_host_memory_already_is_not_copied_again():
    blocks = pool(blocks=2)
    blocks.free_all(blocks.hold(blocks.match([b"a"]), [b"a"]))
    blocks.tier.take_copies()
    blocks.allocate(2)  # evicts c, then a
    assert blocks.tier.stored == 3 and len(blocks.tier.take_copies()[0]) == 8


def test_a_full_tier_forgets_what_was_not_used_for_longest():
    blocks = pool(host=2)
    blocks.allocate(3)
    assert [blocks.match([name]).tables[0] for name in (b"a", b"b", b"c")] == [[], [IN_HOST], [IN_HOST]]
    out = protocol.unpack_u32(blocks.tier.take_copies()[0]).tolist()
    assert out == [2, 0, 1, 1] and blocks.tier.stored == 2  # host block 0 was given twice, and is written once


def test_what_a_plan_reads_is_not_overwritten_by_it():
    blocks = pool(blocks=2, host=1)  # a is in host memory, b and c in the pool
    held = blocks.hold(blocks.match([b"a"]), [b"a"])  # evicts b, for which there is no room
    assert blocks.tier.take_copies()[0] == b"\0" * 8 and b"b" not in blocks.tier
    blocks.check(held)


def test_few_blocks_are_computed_again():
    blocks = pool(blocks=1, least=3)
    assert blocks.match([b"a", b"b", b"c"]).tables[0] == []
    blocks.tier.least = 2
    assert blocks.match([b"a", b"b", b"c"]).tables[0] == [IN_HOST, IN_HOST, 0]


def test_a_prefix_comes_back_from_host_memory():
    engine = Engine(blocks=16, tier=HostTier(64), max_model_len=60)
    prompts = {name: [i, *range(30)] for i, name in enumerate("abcd")}
    for turn in ("", "2"):
        for name, prompt in prompts.items():
            engine.scheduler.add(request(name + turn, prompt, 5))
            engine.run()
            assert engine.tokens[name + turn] == alone(prompt, 5)
    assert [engine.cached[name + "2"] for name in prompts] == [28] * 4
    stats = engine.scheduler.stats()
    assert stats.host_loads > 0 and 0 < stats.host_blocks_used <= stats.host_stores <= stats.host_blocks_total == 64


def test_a_sequence_waits_for_the_next_plan_where_this_one_copies_enough_back():
    engine = Engine(blocks=24, tier=HostTier(64, most=6), max_model_len=60)
    prompts = {name: [i, *range(30)] for i, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        engine.scheduler.add(request(name, prompt, 5))
        engine.run()
    for name, prompt in prompts.items():
        engine.scheduler.add(request(name + "2", prompt, 5))
    tier, loaded = engine.scheduler.blocks.tier, []
    before = tier.loaded
    while engine.step():
        if tier.loaded > before:
            loaded.append(tier.loaded - before)
            before = tier.loaded
    assert len(loaded) > 1 and max(loaded) == 7  # each has seven blocks, and the first of them are more than enough
    assert all(engine.tokens[name + "2"] == alone(prompt, 5) for name, prompt in prompts.items())


def test_a_preempted_sequence_comes_back_from_host_memory():
    engine = Engine(blocks=12, tier=HostTier(64), max_model_len=48)
    prompts = {str(i): [i, i + 1, i + 2] for i in range(3)}
    for name, prompt in prompts.items():
        engine.scheduler.add(request(name, prompt, 40))
    engine.run()
    assert engine.tokens == {name: alone(prompt, 40) for name, prompt in prompts.items()}
    stats = engine.scheduler.stats()
    assert stats.preemptions >= stats.swapped_in > 0


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_tokens_are_those_of_a_sequence_alone(seed):
    """Requests that share beginnings, and aborts, with pools and tiers too small for them."""
    draw = random.Random(seed)
    engine = Engine(
        blocks=draw.randint(12, 20),
        tier=HostTier(draw.choice([1, 3, 20, 60]), draw.choice([1, 1, 3]), draw.choice([1, 4, 60])),
        budget=draw.randint(3, 30), max_model_len=48, stages=draw.choice([1, 1, 2]),
    )  # fmt: skip
    check_random_requests(engine, draw, 28, 48)
    assert engine.scheduler.blocks.tier.stored > 0
