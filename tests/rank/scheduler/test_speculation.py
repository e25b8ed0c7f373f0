"""How many drafts a step verifies."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
from phalanx.rank import protocol
from phalanx.rank.scheduler.blocks import Blocks
from phalanx.rank.scheduler.scheduler import Scheduler
from phalanx.rank.scheduler.speculation import (
    AHEAD,
    CATCH_UP,
    FEW,
    FIRST_RATES,
    GAIN,
    MAX_PAUSE,
    MAX_REST,
    PAUSE,
    TRY_AGAIN,
    Rates,
    Speculation,
    StepTimes,
    kind_of_run,
)

from .toy import request, step_output

QUERY_LENS = 1, 2, 4, 8


def speculation(cost, most=1000, model=""):
    """One that knows how long steps take: cost(sequences, query_len) seconds."""
    made = Speculation(QUERY_LENS, most, model)
    for sequences in range(1, 9):
        for query_len in QUERY_LENS:
            for _ in range(FEW):
                made.took(sequences, query_len, sequences, cost(sequences, query_len))
    return made


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(200))
def test_the_choice_is_that_of_brute_force(seed):
    r = random.Random(seed)
    each = r.choice([0.0, 0.05, 0.3, 1.0])
    made = speculation(lambda sequences, query_len: 1 + each * sequences * query_len)
    count = r.randint(1, 8)
    chances = []
    for _ in range(r.randint(1, count)):
        chance = r.choice([0.1, 0.5, 0.9, 0.99])
        chances.append([chance ** (i + 1) for i in range(7)])

    def rate(query_len):
        tokens = count + sum(sum(one[: query_len - 1]) for one in chances)
        return tokens / (1 + each * count * query_len)

    def fair(query_len):
        """Sequences are as fast on the whole, by the geometric mean."""
        each = [1 + sum(one[: query_len - 1]) for one in chances]
        return math.prod(each) * (rate(query_len) / (count - len(each) + sum(each)) / rate(1) * count) ** count >= 0.999

    chosen = made._best(count, chances, list(QUERY_LENS[1:]))
    best = max(map(rate, filter(fair, QUERY_LENS)))
    assert chosen == 1 or fair(chosen)
    assert rate(chosen) >= best / (GAIN + 0.01)  # it has to be clearly better than no drafts
    assert chosen == 1 or rate(chosen) > rate(1)


def sequences(made, *prompts):
    scheduler = Scheduler(Blocks(64, 16), 8, 512, 900, speculation=made)
    for i, prompt in enumerate(prompts):
        scheduler.add(request(str(i), prompt, 100))
    return scheduler


DOCUMENT = list(range(100, 150))


def test_nothing_is_drafted_before_it_is_known_how_long_steps_take():
    scheduler = sequences(Speculation(QUERY_LENS, 64), [*DOCUMENT, 100, 101, 102])
    assert scheduler.speculation.choose([*scheduler._by_id.values()]) == (1, {})


def test_what_matches_is_drafted_where_that_is_fast():
    for each, expected in ((0.0, 8), (0.9, 1)):
        scheduler = sequences(speculation(lambda n, q, each=each: 1 + each * n * (q - 1)), [*DOCUMENT, *DOCUMENT[:30]])
        (one,) = scheduler._by_id.values()
        query_len, drafts = scheduler.speculation.choose([one])
        assert query_len == expected and drafts == ({"0": DOCUMENT[30:37]} if expected > 1 else {})


def test_text_that_matches_nothing_waits_for_nothing():
    """Steps are planned ahead as without speculation."""
    scheduler = sequences(speculation(lambda n, q: 1.0), list(range(30)), list(range(50, 90)))
    steps = [scheduler.schedule()]
    for i in range(20):
        steps.append(scheduler.schedule())
        assert steps[-1] is not None and steps[-1].query_len == 1
        scheduler.update(steps.pop(0), step_output([[200 + 2 * i], [300 + 3 * i]]))
    assert len(steps) == 1


def test_a_sequence_with_drafts_waits_for_its_tokens():
    scheduler = sequences(speculation(lambda n, q: 1.0), [*DOCUMENT, *DOCUMENT[:30]], [1, 2])
    first = scheduler.schedule()
    assert scheduler.schedule() is None  # it probably goes on with what is drafted: the step is waited for
    scheduler.update(first, step_output([[130], [5]]))
    second = scheduler.schedule()
    assert second.query_len == 8 and second.drafts == [DOCUMENT[31:38], []]
    assert scheduler.schedule() is None
    right = [[*DOCUMENT[31:36], 7], [6]]
    a, b = scheduler.update(second, step_output(right))
    assert (a.tokens, b.tokens) == ([*DOCUMENT[31:36], 7], [6])
    scheduler.check()
    third = scheduler.schedule()
    rows = protocol.unpack_u16(third.plan.rejected).tolist()
    assert dict(zip(rows[::2], rows[1::2], strict=True)) == {0: 2, 1: 7}
    assert scheduler.speculation.stats()["speculation"] == {"ngram": [1, 7, 1, 1, 1, 1, 1]}


def test_counts_are_told_with_the_tokens():
    scheduler = Scheduler(Blocks(64, 16), 8, 512, 900, speculation=speculation(lambda n, q: 1.0))
    scheduler.add(request("0", [*DOCUMENT, *DOCUMENT[:30]], 10))
    scheduler.update(scheduler.schedule(), step_output([[130]]))
    (delta,) = scheduler.update(scheduler.schedule(), step_output([[*DOCUMENT[31:38], 5]]))
    assert (delta.finish, delta.drafted, delta.accepted) == ("", 7, 7)
    (delta,) = scheduler.update(scheduler.schedule(), step_output([[6]]))
    assert (delta.finish, delta.drafted, delta.accepted) == ("length", 0, 0)
    scheduler.check_empty()


def test_right_drafts_behind_a_sequences_end_are_not_counted():
    scheduler = Scheduler(Blocks(64, 16), 8, 512, 900, speculation=speculation(lambda n, q: 1.0))
    scheduler.add(request("0", [*DOCUMENT, *DOCUMENT[:30]], 4))
    scheduler.update(scheduler.schedule(), step_output([[130]]))
    (delta,) = scheduler.update(scheduler.schedule(), step_output([[*DOCUMENT[31:38], 5]]))
    assert (len(delta.tokens), delta.finish, delta.drafted, delta.accepted) == (3, "length", 7, 3)


def test_rates_of_a_sequence_begin_with_those_of_others():
    others = Rates(list(FIRST_RATES))
    assert [others[i] for i in range(4)] == list(FIRST_RATES)
    for _ in range(100):
        others.add(0, False)
    own = Rates(others)
    assert own[0] < 0.1 and own[3] == FIRST_RATES[3]
    for _ in range(20):
        own.add(0, True)
    assert own[0] > 0.7 and others[0] > 0.5


def test_kinds_of_runs():
    assert [kind_of_run(n) for n in (3, 5, 9, 17, 1000)] == [0, 1, 2, 3, 3]


def test_a_number_that_was_slow_is_tried_again_ever_more_rarely():
    times, waited = StepTimes(), []
    for _ in range(FEW):
        times.add(1, 1, 1.0)
    assert times[1, 2] < 1.1 and not times[2, 4]
    for _ in range(12):
        times.add(1, 4, 9.0)
        assert times[1, 4] == 9 and times[1, 8] > 9
        waited.append(0)
        while times.tried(1, 4):
            times.passed_over(1, 4)
            waited[-1] += 1
    assert waited == [min(TRY_AGAIN << i, MAX_PAUSE) for i in range(12)]


MEASURED = [(n, q, 1 + 0.1 * n * (q - 1)) for n in (1, 4, 16) for q in QUERY_LENS]


def test_steps_are_compared_by_what_the_start_measured_until_some_were_seen():
    times = StepTimes(MEASURED)
    for n, q in ((1, 8), (4, 2), (2, 4), (10, 1), (16, 8)):  # also between the numbers that were measured
        assert math.isclose(times[n, q], 1 + 0.1 * n * (q - 1)) and times.tried(n, q)
    assert not times[17, 1] and not times[17, 2] and not times.tried(17, 2)
    for _ in range(FEW):
        times.add(4, 1, 3.0)  # longer contexts: the difference stays
    assert math.isclose(times[4, 8], 3 + 0.1 * 4 * 7)
    times.add(4, 8, 9.0)
    assert times[4, 8] == 9 and math.isclose(times[4, 4], 3 + 0.1 * 4 * 3)


def test_what_the_start_measured_may_be_wrong():
    """A machine may have been busy then: it is tried after a while."""
    times = StepTimes([(1, 1, 1.0), (1, 2, 50.0)])
    for _ in range(TRY_AGAIN):
        assert times[1, 2] == 50 and times.tried(1, 2)
        times.passed_over(1, 2)
    assert times[1, 2] < 1.1 and not times.tried(1, 2)


def test_a_start_that_was_timed_drafts_at_once():
    scheduler = sequences(Speculation(QUERY_LENS, 64, measured=MEASURED), [*DOCUMENT, *DOCUMENT[:30]])
    query_len, drafts = scheduler.speculation.choose([*scheduler._by_id.values()])
    assert query_len == 8 and drafts["0"] == DOCUMENT[30:37]


def test_more_tokens_are_tried_behind_fewer():
    made = Speculation(QUERY_LENS, 64)
    assert made._possible(1) == []
    for _ in range(FEW):
        made.took(1, 1, 1, 1.0)
    assert made._possible(1) == [2]
    made.took(1, 2, 2, 1.1)
    assert made._possible(1) == [2, 4]
    made.took(1, 4, 2, 9.0)
    assert made._possible(1) == [2]


def test_one_sequences_drafts_slow_no_others_down():
    made = speculation(lambda n, q: 1 + 0.2 * (q - 1))
    right = [0.99] * 7
    assert made._best(8, [right] * 8, [2, 4, 8]) == 8
    assert made._best(8, [right], [2, 4, 8]) == 1


def test_the_plan_is_small():
    """256 sequences that decode with three drafts each, of which many were rejected."""
    plan = protocol.Plan(
        1, protocol.pack_u16(range(256)), query_len=4, drafts=protocol.pack_i32([-1] * 768),
        rejected=protocol.pack_u16([x for row in range(256) for x in (row, 3)]),
    )  # fmt: skip
    assert len(protocol.encode_plan(plan)) < 4700
    assert len(protocol.encode_plan(protocol.Plan(1, protocol.pack_u16(range(256))))) < 560


def test_a_models_drafts_are_wanted_and_verified_where_that_is_fast():
    for each, expected in ((0.0, 8), (0.9, 1)):
        made = speculation(lambda n, q, each=each: 1 + each * n * (q - 1), model="mtp")
        scheduler = sequences(made, list(range(40)))
        (one,) = scheduler._by_id.values()
        assert made.choose([one]) == (1, {}) and made.model_drafts == expected - 1  # none has been made yet
        made.made(one, list(range(7)))
        assert made.choose([one]) == ((8, {"0": list(range(7))}) if expected > 1 else (1, {}))
        made.made(one, list(range(7)))
        one.tokens.append(5)  # they follow other tokens
        assert made.choose([one]) == (1, {}) and made.model_drafts == expected - 1
    assert made.lookahead == 7


def test_fewer_of_a_models_drafts_are_wanted_where_later_ones_are_wrong():
    made = speculation(lambda n, q: 1 + 0.1 * n * (q - 1), model="mtp")
    scheduler = sequences(made, list(range(40)))
    (one,) = scheduler._by_id.values()
    wanted = []
    for _ in range(60):
        made.made(one, list(range(7)))
        query_len, drafts = made.choose([one])
        wanted.append(made.model_drafts)
        made.verified(one, len(drafts.get("0", ())), min(1, query_len - 1))
    assert wanted[0] > 1 and wanted[-1] == 1
    assert made.stats()["speculation"]["mtp"][2:] == [60]


def test_a_model_rests_ever_longer_where_its_drafts_are_wrong():
    made = speculation(lambda n, q: 1 + 0.4 * (q - 1), model="mtp")
    scheduler = sequences(made, list(range(40)))
    (one,) = scheduler._by_id.values()
    made.choose([])
    assert made.model_drafts  # of the prompt, in the hope that they pay
    ran = []
    for _ in range(3000):
        made.made(one, list(range(7)))
        query_len, drafts = made.choose([one])
        ran.append(made.model_drafts > 0)
        assert query_len == 1 or ran[-1]
        made.verified(one, len(drafts.get("0", ())), 0)
    assert 0 < sum(ran[:100]) < 20 and sum(ran[1000:]) < 25
    rests = [len(list(group)) for runs, group in itertools.groupby(ran) if not runs]
    assert rests[:-1] == sorted(rests[:-1]) and rests[0] >= PAUSE


def test_a_resting_model_reads_prompts_that_may_be_answered_when_it_drafts_again():
    made = speculation(lambda n, q: 1.0, model="mtp")
    scheduler = Scheduler(Blocks(64, 16), 8, 512, 900, speculation=made)
    for pause, reads in ((AHEAD + 1, False), (AHEAD, True)):
        made.model_drafts, made._resumes = 0, made._steps + pause
        scheduler.add(request(str(pause), list(range(30)), 1))
        step = scheduler.schedule()
        assert (step.plan.follows, step.plan.wanted) == (reads, 0) and not step.speculative
        scheduler.update(step, step_output([[5]]))
    plain = sequences(speculation(lambda n, q: 1.0), list(range(30)))
    assert not plain.schedule().plan.follows


def test_stages_compute_other_sequences_while_one_waits_for_its_drafts():
    made = speculation(lambda n, q: 1.0, model="mtp")
    scheduler = Scheduler(Blocks(64, 16), 8, 512, 900, stages=2, speculation=made)
    for name in "ab":
        scheduler.add(request(name, list(range(40)), 100))
    first = scheduler.schedule()
    assert first.plan.wanted == 7 and scheduler.schedule() is None  # nothing of them can be computed yet
    scheduler.update(first, step_output([[1], [2]], drafts=list(range(14))))
    a, b = scheduler.schedule(), scheduler.schedule()
    assert (a.drafts, b.drafts) == ([list(range(7))], [list(range(7, 14))]) and scheduler.schedule() is None
    (delta,) = scheduler.update(a, step_output([[0, 1, 5]], drafts=list(range(20, 27))))
    assert delta.tokens == [0, 1, 5]
    again = scheduler.schedule()
    assert [one.id for one in again.sampled] == ["a"] and again.drafts == [list(range(20, 27))[: again.query_len - 1]]
    scheduler.check([b, again])


def test_steps_with_drafts_leave_the_next_ones_on_the_ranks():
    """The host plans without their ids; how many were right comes with the tokens."""
    scheduler = sequences(speculation(lambda n, q: 1.0, model="mtp"), list(range(40)), list(range(50, 80)))
    first = scheduler.schedule()
    assert first.plan.wanted == 7 and not first.plan.keeps  # it verifies none: they may not be of use
    scheduler.update(first, step_output([[1], [2]], drafts=range(14)))
    second = scheduler.schedule()
    assert second.plan.keeps and second.drafts == [list(range(7)), list(range(7, 14))]
    a, b = scheduler.update(second, step_output([[0, 1, 5], [9]]))
    assert (a.accepted, b.accepted) == (2, 0)
    third = scheduler.schedule()
    made = [protocol.MADE] * (third.query_len - 1)
    assert third.drafts == [made, made] and third.plan.drafts == protocol.pack_i32(2 * made)
    scheduler.update(third, step_output([list(range(third.query_len)), [7]]))
    assert scheduler.speculation.stats()["speculation"]["mtp"][0] == 4
    scheduler.check()


def test_ranks_keep_no_drafts_where_others_have_to_know_them():
    """Grammars, and earlier stages, which have no model that drafts."""
    for stages, grammar in ((1, None), (2, None), (1, SimpleNamespace(planned_ahead=False, ready=True, drop=int))):
        made = speculation(lambda n, q: 1.0, model="mtp")
        scheduler = Scheduler(Blocks(64, 16), 8, 512, 900, stages=stages, speculation=made)
        scheduler.add(request("a", list(range(40)), 100))
        scheduler.update(scheduler.schedule(), step_output([[1]], drafts=range(7)))
        if grammar is not None:
            grammar.__dict__.update(pending=0)
            scheduler.add(request("b", list(range(60, 90)), 100), grammar=grammar)
        step = scheduler.schedule()
        assert step.query_len > 1 and step.plan.wanted and step.plan.keeps == (stages == 1 and grammar is None)


def test_kept_drafts_that_are_not_verified_say_nothing():
    made = speculation(lambda n, q: 1.0, model="mtp")
    (one,) = sequences(made, list(range(40)))._by_id.values()
    made.made(one, [protocol.MADE] * 7)
    before = made._model_rates[0]
    one.tokens.append(5)
    made.made(one, [6])
    assert made._model_rates[0] == before
    one.tokens.append(6)
    made.made(one, [7])
    assert made._model_rates[0] > before


def test_a_preempted_sequence_has_no_drafts_of_its_old_row():
    """Its last token may be a chunk of its own when it is computed again: ranks keep drafts by rows."""
    made = speculation(lambda n, q: 1.0, model="mtp")
    scheduler = Scheduler(Blocks(64, 16), 8, 9, 900, speculation=made)
    scheduler.add(request("0", list(range(8)), 100))
    scheduler.update(scheduler.schedule(), step_output([[0]], drafts=range(7)))
    kept = scheduler.schedule()
    scheduler.update(kept, step_output([[5]]))
    (one,) = scheduler.running
    assert kept.plan.keeps and len(one.tokens) == 10
    scheduler._preempt(one)
    scheduler.update(scheduler.schedule(), step_output([]))  # 9 of its 10 tokens
    assert not scheduler.schedule().plan.drafts


def test_steps_are_timed_behind_their_kind(monkeypatch):
    """The step behind one whose drafts are kept waits for these, too: as long as its own are waited for elsewhere."""
    scheduler = sequences(speculation(lambda n, q: 1.0, model="mtp"), list(range(40)))
    timed = []
    monkeypatch.setattr(scheduler.speculation, "took", lambda sequences, query_len, *_: timed.append(query_len))
    scheduler.update(scheduler.schedule(), step_output([[41]], drafts=range(7)))
    counts = []
    for _ in range(3):
        step = scheduler.schedule()
        assert step.plan.keeps and step.timed
        scheduler.update(step, step_output([[7]]))
        counts.append(len(timed))
    assert counts == [0, 1, 2]


def test_a_model_reads_some_tokens_before_it_drafts_again():
    """Its keys and values of what came while it rested are missing. Steps in which it reads on are not timed."""
    made = speculation(lambda n, q: 1 + 0.4 * (q - 1), model="mtp")
    (one,) = sequences(made, list(range(40)))._by_id.values()
    does = []
    for _ in range(600):
        made.made(one, list(range(7)))
        _, drafts = made.choose([one])
        does.append("drafts" if made.model_drafts else "follows" if made.model_follows else "rests")
        made.verified(one, len(drafts.get("0", ())), 0)
    kinds = [(kind, len(list(group))) for kind, group in itertools.groupby(does)]
    assert [kind for kind, _ in kinds[:7]] == ["drafts", *["rests", "follows", "drafts"] * 2]
    assert {count for kind, count in kinds[:-1] if kind == "follows"} == {CATCH_UP}
    scheduler = Scheduler(Blocks(64, 16), 8, 512, 900, speculation=made)
    scheduler.add(request("1", [1, 2], 100))
    scheduler.update(scheduler.schedule(), step_output([[5]]))
    made._behind, made._resumes = 2, 0  # it has just begun to read on
    steps = []
    for _ in range(3):
        steps.append(scheduler.schedule())
        scheduler.update(steps[-1], step_output([[6]], drafts=[0] * steps[-1].plan.wanted))
    assert [(step.plan.follows, step.plan.wanted > 0, step.timed) for step in steps] == [
        (True, False, False), (True, False, False), (False, True, False),
    ]  # fmt: skip


def test_a_model_misses_steps_of_grammars_that_it_may_not_draft_for():
    made = speculation(lambda n, q: 1.0, model="mtp")
    (one,) = sequences(made, list(range(40)))._by_id.values()
    one.grammar = SimpleNamespace(planned_ahead=False)
    for _ in range(3):
        assert made.choose([one]) == (1, {}) and not made.model_drafts and not made.model_follows
    one.grammar, does = None, []
    for _ in range(5):
        made.choose([one])
        does.append((made.model_follows, made.model_drafts > 0))
    assert does == [(True, False)] * 3 + [(False, True)] * 2


@pytest.mark.parametrize("allowed", [True, False])
def test_drafts_that_a_grammar_forbids_are_not_verified(allowed):
    """The first of them: masks of the others are made while the step is sent."""
    made, text = speculation(lambda n, q: 1.0), list(range(40)) * 2
    (one,) = sequences(made, text)._by_id.values()
    asked = []
    one.grammar = SimpleNamespace(
        planned_ahead=True, ready=True, over="", forced=[], allows=lambda token: asked.append(token) or allowed
    )
    query_len, drafts = made.choose([one])
    assert asked == [0]
    assert (query_len > 1, [*drafts.values()][:1]) == ((True, [list(range(query_len - 1))]) if allowed else (False, []))
    made.verified(one, 0, 0)
    assert not made.counts


def test_text_that_never_matches_is_looked_at_ever_more_rarely():
    made = speculation(lambda n, q: 1.0)
    scheduler = sequences(made, list(range(30)), list(range(50, 90)))
    found = [*scheduler._by_id.values()]
    looked = 0
    for i in range(200):
        made.choose(found)
        looked += all(made._drafters[one.id].count == len(one.tokens) for one in found)
        for one in found:
            one.tokens.append(1000 + i)
            one.length += 1
    assert looked <= 6 + 200 // MAX_REST
    for one in found:  # it is found all the same
        one.tokens += DOCUMENT + DOCUMENT[:20]
        one.length += 70
    for _ in range(MAX_REST):
        query_len, drafts = made.choose(found)
    assert query_len == 8 and drafts["0"][0] == 120
