"""Prefixes of models that keep a state of each sequence: the toy ranks check each row's state against its tokens."""

import random

import pytest
from phalanx.rank.scheduler.snapshots import Snapshots

from .toy import Engine, alone, check_random_requests, request


def run(engine, name, prompt, count=4):
    engine.scheduler.add(request(name, prompt, count))
    engine.run()
    assert engine.tokens[name] == alone(prompt, count)
    return engine.cached[name]


def test_snapshots_without_a_prefix_cache_are_refused():
    with pytest.raises(ValueError, match="4 state.*snapshots"):
        Engine(snapshots=4, prefix_cache=False)


def test_a_conversation_goes_on_from_its_last_prompt():
    engine = Engine(snapshots=4)
    prompt = list(range(22))
    assert run(engine, "first", prompt) == 0
    assert run(engine, "again", prompt) == 20  # five blocks of four; the last token's logits are needed
    prompt += engine.tokens["first"] + [1, 2, 3]
    assert run(engine, "turn", prompt) == 20
    assert run(engine, "next turn", [*prompt, 4, 5]) == 28
    stats = engine.scheduler.stats()
    assert (stats.snapshots_used, stats.snapshot_saves, stats.snapshot_loads) == (2, 2, 3)
    assert stats.cached_tokens == 20 + 20 + 28


def test_prompts_leave_a_snapshot_where_they_part():
    engine = Engine(snapshots=8, blocks=64)
    system = [9] * 17
    assert run(engine, "0", system + [0] * 12) == 0
    assert run(engine, "1", system + [1] * 12) == 0  # its blocks are known as far as 16, but no state there
    assert run(engine, "2", system + [2] * 12) == 16


def test_prompts_of_one_step_do_not_read_a_snapshot_that_it_is_yet_to_write():
    engine = Engine(snapshots=4, budget=64)
    prompt = list(range(18))
    for name in "ab":
        engine.scheduler.add(request(name, prompt, 4))
    engine.run()
    assert engine.tokens["a"] == engine.tokens["b"] == alone(prompt, 4)
    assert engine.scheduler.stats().snapshot_saves == 1
    assert engine.cached["b"] == 0


def test_short_prompts_leave_none():
    engine = Engine(snapshots=4)
    run(engine, "short", [1] * 8)
    assert engine.scheduler.stats().snapshot_saves == 0 and engine.scheduler.stats().chunks == 0
    assert run(engine, "longer", [1] * 12) == 0


def test_without_states_prefixes_need_no_snapshot():
    engine = Engine()
    run(engine, "a", [1] * 9)
    assert run(engine, "b", [1] * 9) == 8


def test_the_least_used_one_makes_room():
    engine = Engine(snapshots=2, blocks=64)
    prompts = [[i] * 18 for i in range(3)]
    for i in (0, 1):
        run(engine, f"{i}", prompts[i])
    assert run(engine, "0 again", prompts[0]) == 16
    assert run(engine, "2", prompts[2]) == 0
    assert run(engine, "0 once more", prompts[0]) == 16
    assert run(engine, "1 again", prompts[1]) == 0


def test_a_snapshot_goes_with_its_block():
    engine = Engine(snapshots=4, blocks=8)
    run(engine, "a", [1] * 18)
    assert engine.scheduler.blocks.snapshots.num_used == 1
    run(engine, "b", [2] * 26)
    assert engine.scheduler.blocks.snapshots.num_used == 1
    assert run(engine, "a again", [1] * 18) == 0


def test_a_preempted_sequence_goes_on_from_its_snapshot():
    engine = Engine(blocks=14, snapshots=8, budget=16)
    prompts = {str(i): [i] * 17 for i in range(2)}
    for name, prompt in prompts.items():
        engine.scheduler.add(request(name, prompt, 16))
    engine.run()
    for name, prompt in prompts.items():
        assert engine.tokens[name] == alone(prompt, 16)
    stats = engine.scheduler.stats()
    assert stats.preemptions > 0 and stats.snapshot_loads > 0
    engine.scheduler.check_empty()


def test_lost_places_are_found():
    snapshots = Snapshots(2)
    snapshots.save(0, b"a")
    snapshots.take_copies()
    snapshots.check()
    snapshots.slots.clear()
    with pytest.raises(RuntimeError, match="accounting.*1 of 2"):
        snapshots.check()


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(40))
def test_states_are_right_under_preemption_aborts_and_eviction(seed):
    draw = random.Random(seed)
    engine = Engine(
        blocks=draw.randint(14, 30), snapshots=draw.choice([1, 2, 3, 12]), budget=draw.randint(3, 30),
        max_model_len=56, stages=draw.choice([1, 1, 2]), max_num_seqs=draw.randint(2, 8),
    )  # fmt: skip
    check_random_requests(engine, draw, 32, 56)
    assert engine.scheduler.blocks.snapshots.saved > 0
