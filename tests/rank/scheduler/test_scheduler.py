import random

import msgspec
import pytest
from phalanx.rank import protocol

from .toy import Engine, alone, request, step_output


def test_one_sequence_gets_its_tokens_and_ends_by_length():
    engine = Engine()
    engine.scheduler.add(request("a", [1, 2, 3], 10))
    engine.run()
    assert engine.tokens["a"] == alone([1, 2, 3], 10)
    assert engine.finish == {"a": "length"}
    assert engine.scheduler.blocks.num_used == 0


def test_a_stop_token_ends_it_and_is_not_shown():
    want = alone([1, 2, 3], 30)
    stop = want[7]
    assert stop not in want[:7]
    engine = Engine()
    engine.scheduler.add(request("a", [1, 2, 3], 30, stop_token_ids=(stop,)))
    engine.run()
    assert engine.tokens["a"] == want[:7]
    assert engine.finish == {"a": "stop"}


def test_min_tokens_lets_an_early_stop_token_pass():
    want = alone([1, 2, 3], 30)
    engine = Engine()
    engine.scheduler.add(request("a", [1, 2, 3], 12, stop_token_ids=(want[2],), min_tokens=5))
    engine.run()
    assert engine.tokens["a"][:3] == want[:3]


def test_a_long_prompt_is_computed_in_chunks_and_does_not_stall_a_running_sequence():
    engine = Engine(blocks=64, budget=8)
    engine.scheduler.add(request("short", [1, 2], 20))
    for _ in range(3):
        engine.step()
    engine.scheduler.add(request("long", range(40), 4))
    before = len(engine.ranks.plans)
    engine.run()
    assert engine.tokens == {"short": alone([1, 2], 20), "long": alone(range(40), 4)}
    chunked = [p for p in engine.ranks.plans[before:] if p.counts]
    assert len(chunked) >= 5
    assert all(len(p.rows) // 2 == 2 for p in chunked[1:])  # the short one decodes beside every chunk


def test_chunks_end_with_images_whose_tokens_attend_to_each_other():
    """Beyond the budget, if need be, which sequences that decode do not pay for."""
    engine = Engine(blocks=64, budget=8)
    engine.scheduler.add(request("short", [1, 2], 20))
    engine.step()
    picture = protocol.Picture(b"a", 10, 26, 5, 5, ((12, 25), (26, 35)))
    long = msgspec.structs.replace(request("long", range(40), 4), pictures=[picture])
    engine.scheduler.add(msgspec.structs.replace(long, pixels=[protocol.Pixels(b"a", 1, 1, b"   ")]))
    before = len(engine.ranks.plans)
    engine.run()
    assert engine.tokens == {"short": alone([1, 2], 20), "long": alone(range(40), 4)}
    counts = [protocol.unpack_u32(p.counts).tolist() for p in engine.ranks.plans[before:] if p.counts]
    assert counts == [[7], [18], [10], [5]]  # 7, to the first span's end, to the second's, and the rest
    assert all(len(p.rows) // 2 == 2 for p in engine.ranks.plans[before + 1 : before + 4])
    engine.scheduler.add(msgspec.structs.replace(long, id="again", pixels=[]))  # from block 9 on
    engine.run()
    assert engine.tokens["again"] == engine.tokens["long"]


def test_tokens_under_way_count_until_their_ids_have_come():
    engine = Engine(budget=4)
    engine.scheduler.add(request("a", range(6), 3))
    scheduler = engine.scheduler
    chunk, rest = scheduler.schedule(), scheduler.schedule()
    (sequence,) = scheduler.running
    assert (chunk.sampled, rest.sampled) == ([], [sequence])
    assert (sequence.length, sequence.in_flight, sequence.remaining) == (7, 1, 1)
    ahead = scheduler.schedule()
    assert (sequence.length, sequence.in_flight, sequence.num_computed) == (8, 2, 7)
    scheduler.update(chunk, step_output([]))
    scheduler.update(rest, step_output([[5]]))
    scheduler.update(ahead, step_output([[6]]))
    assert (sequence.tokens[6:], sequence.length, sequence.in_flight) == ([5, 6], 8, 0)


def test_a_step_has_single_tokens_first_and_the_rest_in_order():
    engine = Engine(budget=16)
    engine.scheduler.add(request("b", range(3), 4))
    engine.step()
    for name, count in (("c", 2), ("d", 1), ("e", 30)):
        engine.scheduler.add(request(name, range(count), 4))
    step = engine.scheduler.schedule()
    rows = {sequence.id: sequence.row for sequence in engine.scheduler.running}
    assert protocol.unpack_u16(step.plan.rows).tolist() == [rows[name] for name in "bdce"]
    assert protocol.unpack_u32(step.plan.counts).tolist() == [2, 12]
    assert [sequence.id for sequence in step.sampled] == ["b", "d", "c"]


def test_without_a_prefix_cache_no_block_is_hashed():
    engine = Engine(blocks=64, prefix_cache=False)
    engine.scheduler.add(request("a", range(30), 8))
    sequence = engine.scheduler.waiting[0]
    engine.run()
    assert engine.tokens["a"] == alone(range(30), 8)
    assert sequence.hashes == []


def test_equal_beginnings_are_computed_once():
    engine = Engine(blocks=64)
    prompt = list(range(30))
    engine.scheduler.add(request("a", [*prompt, 1], 5))
    engine.run()
    engine.scheduler.add(request("b", [*prompt, 2], 5))
    engine.run()
    assert engine.cached == {"a": 0, "b": 28}
    assert engine.tokens["b"] == alone([*prompt, 2], 5)


def test_generated_tokens_are_found_again_as_a_prompt():
    engine = Engine(blocks=64)
    engine.scheduler.add(request("a", range(6), 20))
    engine.run()
    grown = [*range(6), *engine.tokens["a"]]
    engine.scheduler.add(request("b", grown, 3))
    engine.run()
    assert engine.cached["b"] >= 20
    assert engine.tokens["b"] == alone(grown, 3)


def test_sequences_admitted_together_share_what_one_of_them_computes_in_the_same_step():
    engine = Engine(blocks=64, budget=100)
    prompt = list(range(20))
    for name in "ab":
        engine.scheduler.add(request(name, prompt, 5))
    engine.run()
    assert engine.cached == {"a": 0, "b": 16}
    assert engine.tokens["a"] == engine.tokens["b"] == alone(prompt, 5)


def test_a_salt_keeps_equal_prompts_apart():
    engine = Engine(blocks=64)
    for name in "ab":
        engine.scheduler.add(request(name, range(30), 3, salt=name))
        engine.run()
    assert engine.cached == {"a": 0, "b": 0}


def test_without_prefix_cache_nothing_is_shared():
    engine = Engine(blocks=64, prefix_cache=False)
    for name in "ab":
        engine.scheduler.add(request(name, range(30), 3))
        engine.run()
    assert engine.cached == {"a": 0, "b": 0}
    assert engine.scheduler.blocks.num_cached == 0


def test_running_out_of_blocks_preempts_the_latest_and_changes_no_token():
    engine = Engine(blocks=12, max_model_len=48)
    for i in range(3):
        engine.scheduler.add(request(str(i), [i, i + 1, i + 2], 30))
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    assert engine.tokens == {str(i): alone([i, i + 1, i + 2], 30) for i in range(3)}


def test_the_lower_priority_number_goes_first():
    engine = Engine(max_num_seqs=1)
    for name, priority in (("late", 5), ("soon", -1), ("middle", 0)):
        engine.scheduler.add(request(name, [1], 2, priority=priority))
    engine.run()
    assert list(engine.finish) == ["soon", "middle", "late"]


def test_an_aborted_sequence_frees_its_blocks_at_once_whatever_is_in_flight():
    engine = Engine()
    for name in "abc":
        engine.scheduler.add(request(name, range(10), 50))
    engine.step(), engine.step()
    engine.scheduler.abort(["a", "unknown", "c"])
    engine.check()
    engine.scheduler.abort(["a"])
    engine.run()
    assert engine.finish == {"b": "length"}
    assert engine.scheduler.blocks.num_used == 0
    assert engine.scheduler.counters.aborted == 2


def test_a_row_without_memory_ends_alone():
    engine = Engine()
    for name in "abc":
        engine.scheduler.add(request(name, range(10), 5))
    ended = engine.scheduler.update
    failed = []

    def update(done, output):
        names = [sequence.id for sequence in done.sampled]
        if "b" in names and not failed:
            failed.append("b")
            output = msgspec.structs.replace(output, failed=[names.index("b")])
        deltas = ended(done, output)
        engine.errors = [(one.id, one.status) for one in deltas if one.error] or getattr(engine, "errors", [])
        return deltas

    engine.scheduler.update = update
    engine.run()
    assert engine.errors == [("b", 503)]
    assert engine.finish == {"a": "length", "b": "error", "c": "length"}
    engine.check()
    assert engine.scheduler.blocks.num_used == 0


def test_an_abort_while_waiting():
    engine = Engine(max_num_seqs=1)
    engine.scheduler.add(request("a", [1], 5))
    engine.scheduler.add(request("b", [1], 5))
    engine.step()
    engine.scheduler.abort(["b"])
    engine.run()
    assert engine.finish == {"a": "length"}


def test_what_can_become_too_long_is_refused():
    engine = Engine(max_model_len=20)
    with pytest.raises(ValueError, match="21 tokens.*most 20"):
        engine.scheduler.add(request("a", range(11), 10))
    engine.scheduler.add(request("a", range(10), 10))
    engine.run()
    assert len(engine.tokens["a"]) == 10


def test_an_id_that_is_in_use_is_refused():
    engine = Engine()
    engine.scheduler.add(request("a", [1, 2, 3], 5))
    with pytest.raises(ValueError, match="8 tokens.*most 100.*used"):
        engine.scheduler.add(request("a", [1, 2, 3], 5))
    engine.run()
    assert engine.tokens["a"] == alone([1, 2, 3], 5)


def test_what_does_not_add_up_is_told_in_numbers():
    def fails(check, words):
        with pytest.raises(RuntimeError, match=f"^{words}$"):
            check()

    scheduler = Engine().scheduler
    scheduler.check_empty()
    scheduler.check()
    scheduler.backlog = 3
    words = "no sequence is left, but 0 run, 0 wait, and 3 tokens are to be computed"
    fails(scheduler.check_empty, words)
    fails(scheduler.check, "the backlog of 3 tokens is not what the sequences have to compute")
    scheduler.backlog = 0
    scheduler._free_rows.pop()
    fails(scheduler.check_empty, "row accounting is broken: 7 of 8 rows are free")

    engine = Engine()
    engine.scheduler.add(request("a", [1, 2, 3], 5))
    engine.step()
    engine.scheduler._free_rows.append(engine.scheduler.running[0].row)
    fails(engine.check, r"row accounting is broken: \[0\]")

    engine = Engine()
    engine.scheduler.add(request("a", [1, 2, 3], 5))
    engine.step()
    engine.step()
    engine.scheduler.running[0].tokens.append(7)
    fails(engine.check, "0 sampled ids have not arrived, 1 are on their way")


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(60))
def test_any_load_gives_each_sequence_the_tokens_it_has_alone(seed):
    """Random pools, budgets, lengths, shared beginnings, stops, priorities and aborts; accounts checked every step."""
    r = random.Random(seed)
    size = r.choice([1, 2, 4, 16])
    longest = r.randint(20, 100)
    max_num_seqs = r.randint(1, 8)
    engine = Engine(
        blocks=-(-longest // size) + r.randint(0, 20),
        block_size=size,
        max_num_seqs=max_num_seqs,
        budget=r.randint(1, 40),
        prefix_cache=r.random() < 0.8,
        max_model_len=longest,
        stages=r.choice([1, 1, 2, 3]),
    )
    stems = [[r.randrange(50) for _ in range(r.randint(1, longest // 2))] for _ in range(3)]
    want, aborted = {}, set()
    for i in range(r.randint(5, 25)):
        prompt = r.choice(stems) + [r.randrange(50) for _ in range(r.randint(0, 5))]
        prompt = prompt[: longest - 2]
        count = r.randint(1, longest - len(prompt))
        stop = tuple(r.sample(range(50), 2)) if r.random() < 0.5 else ()
        engine.scheduler.add(request(str(i), prompt, count, priority=r.choice([0, 0, 1]), stop_token_ids=stop))
        want[str(i)] = (alone(prompt, count, stop), stop)
        for _ in range(r.randint(0, 6)):
            engine.step()
        if r.random() < 0.1:
            victim = str(r.randint(0, i))
            if victim not in engine.finish:
                aborted.add(victim)
            engine.scheduler.abort([victim])
    engine.run()
    for name, (tokens, stop) in want.items():
        if name in aborted:
            assert engine.tokens.get(name, []) == tokens[: len(engine.tokens.get(name, []))]
        else:
            ended = tokens[-1] in stop
            assert engine.tokens.get(name, []) == (tokens[:-1] if ended else tokens)
            assert engine.finish[name] == ("stop" if ended else "length")
    assert engine.scheduler.blocks.num_used == 0


def test_the_wire_256_decoding_sequences_that_cross_a_block_border_together_fit_in_4_kb():
    engine = Engine(blocks=256 * 10, block_size=16, max_num_seqs=256, budget=100_000, max_model_len=160)
    for i in range(256):
        engine.scheduler.add(request(str(i), [i % 50] * 16, 100))
    engine.step()
    sizes, crossings = [], 0
    while len(sizes) < 36:
        planned = len(engine.ranks.plans)
        engine.step()
        for plan in engine.ranks.plans[planned:]:
            assert len(plan.rows) == 512 and not plan.counts and not plan.new
            sizes.append(len(protocol.encode_plan(plan)))
            crossings += len(plan.block_ids) == 1024
    assert crossings >= 2
    assert max(sizes) <= 4096, max(sizes)
    assert max(sizes) <= 4000 - 4  # it goes in one eager message


@pytest.mark.parametrize("stages", [2, 3])
def test_pipeline_stages_compute_different_sequences_as_many_each(stages):
    engine = Engine(blocks=400, max_num_seqs=24, budget=1000, stages=stages)
    for i in range(20):
        engine.scheduler.add(request(str(i), [i, 1, 2], 60))
    for _ in range(30):
        engine.step()
    planned = engine.ranks.plans[-12:]
    rows = [set(protocol.unpack_u16(plan.rows)) for plan in planned]
    for i in range(len(rows) - stages + 1):
        assert len(set.union(*rows[i : i + stages])) == sum(map(len, rows[i : i + stages])) == 20
        assert max(map(len, rows[i : i + stages])) == -(-20 // stages)
    engine.run()
    assert all(engine.tokens[str(i)] == alone([i, 1, 2], 60) for i in range(20))


def test_one_sequence_does_not_wait_for_its_turn():
    """With nothing else to do it is planned ahead as on one stage, but not so far that its end wastes more rows."""
    engine = Engine(stages=4)
    engine.scheduler.add(request("a", [1, 2, 3], 30))
    while not engine.tokens.get("a"):
        engine.step()
    assert len(engine.ranks.plans) == 2
    engine.run()
    assert engine.tokens["a"] == alone([1, 2, 3], 30)
    assert len(engine.ranks.plans) == 30


def test_a_prompt_goes_through_the_stages_without_gaps():
    engine = Engine(blocks=64, budget=8, stages=2, max_model_len=200)
    engine.scheduler.add(request("a", range(40), 5))
    engine.scheduler.add(request("b", range(40, 44), 5))
    engine.run()
    counts = [protocol.unpack_u32(plan.counts).tolist() for plan in engine.ranks.plans[:5]]
    assert [sum(c) for c in counts] == [8] * 5
    assert engine.tokens == {"a": alone(range(40), 5), "b": alone(range(40, 44), 5)}


def test_a_budget_below_the_number_of_sequences_stalls_none_of_them():
    engine = Engine(blocks=100, max_num_seqs=20, budget=4)
    for i in range(12):
        engine.scheduler.add(request(str(i), [i, 1, 2], 30))
    engine.run()
    assert all(engine.tokens[str(i)] == alone([i, 1, 2], 30) for i in range(12))
    assert len(engine.ranks.plans) < 60  # all of them decode in each step


def test_a_step_of_single_tokens_reads_no_block_that_it_fills():
    engine = Engine(blocks=64, budget=3)  # blocks of 4
    engine.scheduler.add(request("a", [1, 2, 3, 4], 5))
    engine.step()
    engine.scheduler.add(request("b", [1, 2, 3, 4, 5], 5))
    engine.step()
    plan = engine.ranks.plans[-1]
    assert plan.counts or not any(new.num_computed for new in plan.new)
    engine.run()
    assert engine.tokens == {"a": alone([1, 2, 3, 4], 5), "b": alone([1, 2, 3, 4, 5], 5)}
