"""Steps that sample several tokens of a row."""

import random

import pytest
from phalanx.rank import protocol
from phalanx.rank.scheduler.blocks import Blocks
from phalanx.rank.scheduler.scheduler import Scheduler

from .toy import Engine, alone, request, step_output


def scheduler(*requests, blocks=32, block_size=4, budget=64, max_model_len=100):
    made = Scheduler(Blocks(blocks, block_size), 8, budget, max_model_len)
    for one in requests:
        made.add(one)
    return made


def update(one, *tokens, logprobs=None):
    """The next step's deltas, where it samples these tokens of its rows."""
    deltas = one.update(one.schedule(), step_output(tokens, logprobs))
    one.check()
    return deltas


def test_lengths_follow():
    one = scheduler(request("a", [1, 2, 3, 4, 5]), request("b", [1, 2]))
    a, b = update(one, [6, 7, 8], [3])
    assert (a.tokens, b.tokens, a.finish) == ([6, 7, 8], [3], "")
    found = {s.id: (s.num_computed, s.length, len(s.tables[0])) for s in one.running}
    assert found == {"a": (7, 8, 2), "b": (2, 3, 1)}
    assert one.counters.output_tokens == 4 and one.backlog == 2
    planned = one.schedule()
    assert not planned.plan.counts and len(planned.plan.rows) == 4, "one token each"
    assert not planned.plan.block_ids
    one.update(planned, step_output([[9], [4]]))
    plan = one.schedule().plan
    assert list(protocol.unpack_u16(plan.block_rows)) == [0]  # a's next token is its ninth


def test_a_stop_token_ends_the_sequence_in_the_middle():
    one = scheduler(request("a", [1, 2], stop_token_ids=(9,)), request("b", [1, 2], stop_token_ids=(9,), min_tokens=2))
    a, b = update(one, [5, 9, 7], [9, 9, 9])
    assert (a.tokens, a.finish, a.stop_token) == ([5], "stop", 9)
    assert (b.tokens, b.finish, b.stop_token) == ([9, 9], "stop", 9)
    assert one.counters.output_tokens == 5 and one.idle
    one.check_empty()


def test_no_more_than_max_tokens():
    one = scheduler(request("a", [1, 2], 4), block_size=16)
    assert [d.tokens for d in update(one, [5, 6])] == [[5, 6]]
    (delta,) = update(one, [7, 8, 9])
    assert (delta.tokens, delta.finish) == ([7, 8], "length")
    one.check_empty()


def test_every_token_has_its_own_log_probability():
    one = scheduler(request("a", [1]), request("b", [1], stop_token_ids=(9,)), request("c", [1]))
    given = {i: protocol.TokenLogprob(i, -float(i), []) for i in (0, 1, 2, 3, 5)}
    a, b, c = update(one, [5, 6], [7, 9], [8, 4], logprobs=given)
    assert [x.token for x in a.logprobs] == [0, 1]
    assert [x.token for x in b.logprobs] == [2]  # the stop token is not shown
    assert [x.token for x in c.logprobs] == [5]


def test_rows_of_sequences_that_have_ended_are_passed_over():
    one = scheduler(request("a", [1]), request("b", [1]))
    planned = one.schedule()
    one.abort(["a"])
    (delta,) = one.update(planned, step_output([[5, 6], [7, 8]]))
    assert (delta.id, delta.tokens) == ("b", [7, 8])
    one.check()


def test_their_blocks_are_found_again():
    one = scheduler(request("a", [1, 2, 3, 4, 5], 20))
    update(one, [6, 7, 8])
    update(one, [9])  # computes the eighth token
    one.add(request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    one.schedule()
    assert next(s for s in one.running if s.id == "b").cached_tokens == 8


def test_a_sequence_that_was_preempted_meanwhile_keeps_them():
    one = scheduler(request("a", [1, 2, 3, 4, 5], 20))
    planned = one.schedule()
    one._preempt(one.running[0])
    (delta,) = one.update(planned, step_output([[6, 7, 8]]))
    one.check()
    assert delta.tokens == [6, 7, 8]
    (new,) = one.schedule().plan.new
    assert list(protocol.unpack_u32(new.tokens)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_step_that_wrote_past_its_blocks_is_noticed():
    one = scheduler(request("a", [1, 2, 3], 20))
    with pytest.raises(RuntimeError, match="computed 5.*4.*block"):
        update(one, [5, 6, 7])


def test_what_does_not_fit_the_plan_is_refused():
    one = scheduler(request("a", [1]), request("b", [1]))
    with pytest.raises(ValueError, match="shorter"):
        update(one, [5, 6])


def test_the_wire():
    """One token a row takes four bytes and no list of counts."""
    output = step_output([[i] for i in range(256)])
    assert len(protocol.encode_step_output(output)) == 1024 + 12
    for tokens in ([], [[1], [2]], [[1, 2, 3], [4], [5, 6]]):
        assert protocol.decode_step_output(protocol.encode_step_output(step_output(tokens))).tokens() == tokens


@pytest.mark.parametrize("seed", range(30))
def test_any_load_gives_each_sequence_the_tokens_it_has_alone(seed):
    """The runs of test_scheduler.py, with ranks that sample as many tokens of a row as its blocks hold."""
    r = random.Random(seed)
    size, longest = r.choice([2, 4, 16]), r.randint(20, 100)
    engine = Engine(
        blocks=-(-longest // size) + r.randint(0, 20), block_size=size, max_num_seqs=r.randint(1, 8),
        budget=r.randint(1, 40), prefix_cache=r.random() < 0.8, max_model_len=longest, most=r.randint(2, 9),
    )  # fmt: skip
    want = {}
    for i in range(r.randint(5, 25)):
        prompt = [r.randrange(3) for _ in range(r.randint(1, longest // 2))]
        count = r.randint(1, longest - len(prompt))
        stop = tuple(r.sample(range(50), 2)) if r.random() < 0.5 else ()
        engine.scheduler.add(request(str(i), prompt, count, priority=r.choice([0, 0, 1]), stop_token_ids=stop))
        want[str(i)] = (alone(prompt, count, stop), stop)
        for _ in range(r.randint(0, 6)):
            engine.step()
    engine.run()
    for name, (tokens, stop) in want.items():
        ended = tokens[-1] in stop
        assert engine.tokens.get(name, []) == (tokens[:-1] if ended else tokens)
        assert engine.finish[name] == ("stop" if ended else "length")
    assert engine.scheduler.blocks.num_used == 0
    assert len(engine.ranks.plans) < sum(len(tokens) for tokens, _ in want.values())
