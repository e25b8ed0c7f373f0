"""Blocks behind windows are freed, found again as far as a window goes, and nobody's tokens change."""

import random

import pytest
from phalanx.rank import cache_groups, protocol
from phalanx.rank.cache_groups import CacheGroup
from phalanx.rank.scheduler.blocks import NONE, Blocks, chain, root
from phalanx.rank.scheduler.host_tier import HostTier

from .toy import Engine, alone, check_random_requests, request

BLOCK = 4
GROUPS = {
    "all windows": (CacheGroup(6),),
    "as many of both": (CacheGroup(), CacheGroup(6)),
    "few full layers": (CacheGroup(0, 3), CacheGroup(6)),
    "many full layers": (CacheGroup(), CacheGroup(6, 2)),
    "two windows": (CacheGroup(0, 2), CacheGroup(13), CacheGroup(5, 3)),
    "chunks": (CacheGroup(), CacheGroup(8, 2, chunked=True)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Else nothing of sequences this short would be freed."""
    monkeypatch.setattr(cache_groups, "TILE", 3)


@pytest.fixture(params=GROUPS.values(), ids=GROUPS)
def groups(request):
    return request.param


def hashes(count):
    found = [root("")]
    for i in range(count):
        found.append(chain(found[-1], bytes([i])))
    return found[1:]


def held(groups, length, step):
    return cache_groups.held(groups, BLOCK, length, step)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_sequence_holds_a_window(groups, prefix_cache):
    engine = Engine(blocks=200, groups=groups, prefix_cache=prefix_cache, max_model_len=200)
    prompt = [i % 7 for i in range(90)]
    engine.scheduler.add(request("a", prompt, 90))
    most = {True: 0, False: 0}  # by whether it decodes
    while engine.step():
        for sequence in engine.scheduler.running:
            decodes = sequence.num_computed > len(prompt) + BLOCK * 3
            most[decodes] = max(most[decodes], engine.scheduler.blocks.num_used)
            for group, table in zip(groups, sequence.tables, strict=True):
                kept = len(table) - table.count(NONE)
                if not group.window:
                    assert kept == len(table)
                elif decodes:
                    assert kept <= cache_groups.covering(group, BLOCK, group.window + 3 + 1) + 1
    assert 0 < most[True] <= held(groups, 180, 1) and 0 < most[False] <= held(groups, 180, 16)
    assert held(groups, 180, 16) < sum(cache_groups.covering(group, BLOCK, 180) for group in groups)
    assert engine.tokens["a"] == alone(prompt, 90, window=groups[0].window)
    assert engine.scheduler.blocks.num_used == 0


def test_a_pool_of_what_is_held_serves_the_longest_sequence(groups):
    blocks = held(groups, 180, 16)
    assert cache_groups.longest(groups, BLOCK, blocks, 16) >= 180
    engine = Engine(blocks=blocks, groups=groups, max_model_len=180, stages=2)
    prompts = {str(i): [i, *range(100)] for i in range(3)}
    for name, prompt in prompts.items():
        engine.scheduler.add(request(name, prompt, 79))
    engine.run()
    assert engine.tokens == {name: alone(prompt, 79, window=groups[0].window) for name, prompt in prompts.items()}


def test_a_prefix_needs_the_newest_window_alone(groups):
    engine = Engine(blocks=300, groups=groups, max_model_len=300)
    prompt = [i % 11 for i in range(97)]
    engine.scheduler.add(request("a", prompt, 100))
    engine.run()
    whole = [*prompt, *engine.tokens["a"]]
    unit = 4 * 6  # tokens after which blocks of all groups end
    for name, count in (("end", 193), ("middle", 97), ("beginning", 30)):
        engine.scheduler.add(request(name, [*whole[:count], 1], 9))
        engine.run()
        assert engine.cached[name] >= count - count % unit  # blocks behind the window are still in the prefix cache
        assert engine.tokens[name] == alone([*whole[:count], 1], 9, window=groups[0].window)


def test_a_window_with_a_gap_is_no_hit():
    blocks = Blocks(30, BLOCK, groups=(CacheGroup(), CacheGroup(6)))
    tables = [blocks.allocate(8), blocks.allocate(8)]
    known = hashes(8)
    blocks.cache_full(tables, known, 0, 8)
    blocks.release(tables, 32)
    assert tables[1][:6] == [NONE] * 6 and NONE not in tables[1][6:] + tables[0]
    found = blocks.match(known)
    assert found.matched == 8 and found.tables == tables
    blocks.free_all(tables)
    kept = blocks.hold(blocks.match(known[:3]), known)  # of the beginning all that a window of six needs, 4 to 12
    assert kept[1][0] == NONE
    held_by_others = blocks.allocate(blocks.num_free)
    blocks.free(held_by_others[:4])
    assert blocks.match(known).matched == 3, "the rest was evicted"
    blocks.check([*kept, held_by_others[4:]])


def test_groups_share_no_block_and_no_hash():
    blocks = Blocks(20, BLOCK, groups=(CacheGroup(), CacheGroup(6)))
    tables, known = [blocks.allocate(1), blocks.allocate(1)], hashes(1)
    blocks.cache_full(tables, known, 0, 1)
    assert blocks.match(known).tables == tables and tables[0] != tables[1]
    blocks.check(tables)


def test_preemption_under_windows(groups):
    engine = Engine(blocks=held(groups, 60, 16) * 3 // 2, groups=groups, max_model_len=60, budget=12)
    prompts = {str(i): [i, i + 1, i + 2] for i in range(5)}
    for name, prompt in prompts.items():
        engine.scheduler.add(request(name, prompt, 50))
    engine.run()
    assert engine.tokens == {name: alone(prompt, 50, window=groups[0].window) for name, prompt in prompts.items()}
    assert engine.scheduler.stats().preemptions > 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_tokens_are_those_of_a_sequence_alone(groups, seed):
    """Requests that share beginnings, and aborts, with pools and tiers too small for them."""
    draw = random.Random(seed)
    budget = draw.randint(3, 30)
    engine = Engine(
        blocks=draw.randint(held(groups, 60, budget), held(groups, 60, budget) * 2),
        tier=HostTier(draw.choice([0, 3, 20, 60]), draw.choice([1, 1, 3]), draw.choice([1, 4, 60])),
        budget=budget, max_model_len=60, stages=draw.choice([1, 1, 2]), groups=groups,
        prefix_cache=draw.random() < 0.9,
    )  # fmt: skip
    check_random_requests(engine, draw, 36, 60)


def test_blocks_of_windows_come_back_from_host_memory(groups):
    engine = Engine(blocks=held(groups, 60, 16), tier=HostTier(200), groups=groups, max_model_len=60)
    prompts = {str(i): [i, *range(40)] for i in range(4)}
    for name, prompt in prompts.items():
        engine.scheduler.add(request(name, prompt, 5))
        engine.run()
    for name, prompt in prompts.items():
        engine.scheduler.add(request(name + "again", prompt, 5))
    engine.run()
    assert all(
        engine.tokens[name + "again"] == alone(prompt, 5, window=groups[0].window) for name, prompt in prompts.items()
    )
    stats = engine.scheduler.stats()
    assert stats.host_loads > 0 and sum(engine.cached[name + "again"] for name in prompts) > 0


def test_two_groups_of_256_decoding_sequences_fit_in_4_kb():
    groups = CacheGroup(), CacheGroup(16)
    engine = Engine(
        blocks=256 * 20, block_size=16, max_num_seqs=256, budget=100_000, max_model_len=160, groups=groups
    )  # fmt: skip
    for i in range(256):
        engine.scheduler.add(request(str(i), [i % 50] * 16, 40))
    engine.step()
    sizes, crossings = [], 0
    while len(sizes) < 32:
        planned = len(engine.ranks.plans)
        engine.step()
        for plan in engine.ranks.plans[planned:]:
            sizes.append(len(protocol.encode_plan(plan)))
            crossings += len(plan.block_ids) == 2 * 1024
    assert crossings >= 1 and max(sizes) <= 4000 - 4  # it goes in one eager message


def test_entries_are_chosen_for_little_memory():
    """Two kinds with as many layers each; five layers with windows for one without, as in Gemma 3; two stages."""
    choose = cache_groups.choose_groups
    assert choose([{0: 12, 128: 12}], 16) == (CacheGroup(), CacheGroup(128))
    assert choose([{0: 10, 1024: 52}], 16) == (CacheGroup(0, 5), CacheGroup(1024))
    assert choose([{0: 5, 1024: 26}, {0: 5, 1024: 26}], 16) == (CacheGroup(0, 5), CacheGroup(1024))
    assert choose([{0: 32}], 16) == cache_groups.ONE_GROUP and choose([{4096: 32}], 16) == (CacheGroup(4096),)
    assert choose([{}], 16) == cache_groups.ONE_GROUP
    assert cache_groups.lanes((CacheGroup(0, 6), CacheGroup(1024)), {0: 10, 1024: 52}) == 60


@pytest.mark.parametrize("step", [1, 7, 40])
def test_what_is_held_and_the_longest_are_inverse(groups, step):
    lengths = [cache_groups.longest(groups, BLOCK, blocks, step) for blocks in range(1, 60)]
    assert lengths == sorted(lengths)
    for blocks, length in enumerate(lengths, 1):
        if 0 < length < 1 << 30:
            assert held(groups, length, step) <= blocks < held(groups, length + 1, step)


def test_more_tokens_fit_than_without_windows():
    """A layer's blocks of 16 tokens in a pool of 62 x 8192 of them: Gemma 3 27B's 62 layers, gpt-oss-20b's 24."""
    for layers, length, at_least in [
        ({0: 12, 128: 12}, 8192, 1.9), ({0: 12, 128: 12}, 131072, 1.98),
        ({0: 10, 1024: 52}, 8192, 3.2), ({0: 10, 1024: 52}, 131072, 5.7),
    ]:  # fmt: skip
        groups, memory = cache_groups.choose_groups([layers], 16), 62 * 65536
        blocks = memory // cache_groups.lanes(groups, layers)
        before = memory // sum(layers.values()) * 16
        assert cache_groups.capacity(groups, 16, blocks, length) >= at_least * before
