import math

import numpy as np
import pytest
import torch
from phalanx.comm import threads
from phalanx.rank import protocol
from phalanx.rank.worker.sampler import Sampler, gumbel, is_plain_greedy, tp_argmax
from phalanx.rank.worker.token_masks import RowMasks

VOCAB = 40


def enter(sampler, row, tokens=(1, 2, 3), prompt_len=None, **parameters):
    parameters = {"max_tokens": 10, **parameters}
    sampler.enter(
        protocol.NewSequence(
            row=row,
            tokens=protocol.pack_u32(tokens),
            prompt_len=len(tokens) if prompt_len is None else prompt_len,
            num_computed=0,
            blocks=b"",
            sampling=protocol.SamplingParams(**parameters),
        )
    )


def sampler(**rows) -> Sampler:
    return Sampler(2048, VOCAB, torch.device("cpu"))


def logits(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(s, x, rows, outputs=None):
    rows = np.asarray(rows)
    outputs = np.zeros(len(rows), np.int64) if outputs is None else np.asarray(outputs)
    ids, explained, _ = s.sample(x, rows, outputs)
    return ids.tolist(), explained


def allowed(x, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> dict[int, float]:
    """One row, one rule after the other, as the fields' documentation words them; ids and probabilities."""
    p = (x.double() / temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    mass = sum(p[i] for i in kept)
    nucleus, total = [], 0.0
    for i in kept:
        if top_p < 1 and total / mass >= top_p and nucleus:
            break
        nucleus.append(i)
        total += p[i]
    final = [i for i in nucleus if p[i] >= min_p * p[order[0]]]
    mass = sum(p[i] for i in final)
    return {i: float(p[i] / mass) for i in final}


CASES = [
    {},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 12, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.2},
    {"top_k": 10_000},
]


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_draws_follow_the_distribution_that_the_parameters_describe(parameters):
    n = 2000
    s = sampler()
    x = logits(1)
    for row in range(n):
        enter(s, row, seed=row, **parameters)
    ids, _ = draw(s, x.repeat(n, 1), range(n))
    want = allowed(x[0], **{**parameters, "top_k": min(parameters.get("top_k", 0), VOCAB)})
    counts = np.bincount(ids, minlength=VOCAB)
    assert set(np.flatnonzero(counts)) <= set(want)
    for i, p in want.items():
        assert abs(counts[i] - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1, (i, counts[i], n * p)


def test_one_batch_serves_all_parameters_and_each_row_gets_what_it_has_alone():
    x = logits(len(CASES) * 3, seed=1)
    together = sampler()
    parameters = [{"seed": i, **case} for i, case in enumerate([*CASES, *CASES, *CASES])]
    parameters[3] |= {"temperature": 0.0}
    parameters[5] |= {"logit_bias": {7: 4.0}, "temperature": 0.0}
    parameters[8] |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    for row, p in enumerate(parameters):
        enter(together, row, **p)
    outputs = np.arange(len(x)) * 3
    ids, _ = draw(together, x.clone(), range(len(x)), outputs)
    for row, p in enumerate(parameters):
        s = sampler()
        enter(s, 5, **p)
        assert draw(s, x[row : row + 1].clone(), [5], outputs[row : row + 1])[0] == [ids[row]], p


def test_a_tiny_temperature_is_greedy():
    s = sampler()
    for row, temperature in enumerate((1e-38, 1e-6)):
        enter(s, row, temperature=temperature, seed=1)
    x = logits(2)
    assert draw(s, x.clone(), [0, 1])[0] == x.argmax(-1).tolist()


@pytest.mark.parametrize("spread", [0.01, pytest.param(1.0, marks=pytest.mark.long), 5.0])
def test_a_nucleus_is_the_same_whether_the_whole_vocabulary_is_sorted_or_not(spread, monkeypatch):
    """At the smallest spread it does not fit among the likeliest 1024 tokens."""
    vocab, rows = 20_000, 40
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * spread

    def drawn():
        s = Sampler(rows, vocab, torch.device("cpu"))
        for row in range(rows):
            enter(s, row, seed=row, top_p=0.8 if row % 2 else 0.3, min_p=0.01 * (row % 3))
        return draw(s, x.clone(), range(rows))[0]

    short = drawn()
    monkeypatch.setattr("phalanx.rank.worker.sampler._PREFIX", vocab)
    assert drawn() == short


def test_greedy_is_the_arg_max_and_needs_no_seed():
    s = sampler()
    for row in range(3):
        enter(s, row, temperature=0.0, seed=row)
    x = logits(3)
    assert draw(s, x, range(3))[0] == x.argmax(-1).tolist()


def test_the_noise_depends_on_seed_position_and_id_alone():
    seeds, positions = torch.tensor([3, 3, 4, -5]), torch.tensor([0, 1, 0, 0])
    every = torch.arange(1000)[None]
    noise = gumbel(seeds, positions, every)
    assert torch.equal(noise[1:2], gumbel(seeds[1:2], positions[1:2], every))
    assert torch.equal(noise[:, 500:600], gumbel(seeds, positions, every[:, 500:600]))
    assert torch.isfinite(noise).all()
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(4)).abs().max() < 0.15
    assert abs(noise.mean() - 0.5772) < 0.1 and abs(noise.std() - math.pi / math.sqrt(6)) < 0.1


def splitmix(x: int) -> int:
    """SplitMix64's finaliser with whole numbers, as published."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed, position, token", [(1, 2, 0), (1, 2, 4000), (2**62, 0, 31), (-3, 10**6, 7)])
def test_the_noise_is_the_same_on_every_machine_and_release(seed, position, token):
    golden = 0x9E3779B97F4A7C15
    key = splitmix((seed + (position + 1) * golden) % 2**64)
    uniform = ((splitmix((key + (token + 1) * golden) % 2**64) >> 11) + 0.5) / 2**53
    got = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([[token]])).item()
    assert got == pytest.approx(-math.log(-math.log(uniform)), abs=1e-5)


@pytest.mark.parametrize("outputs", [[], [5, 5, 9], [39]])
def test_penalties(outputs):
    """CTRL's repetition penalty over prompt and output, OpenAI's two over the output only."""
    s = sampler()
    prompt = [1, 2, 2]
    enter(s, 0, [*prompt, *outputs], len(prompt), temperature=0.0, repetition_penalty=1.5, presence_penalty=0.4,
          frequency_penalty=0.3)  # fmt: skip
    x = logits(1)[0]
    want = x.clone()
    for i in {*prompt, *outputs}:
        want[i] = want[i] / 1.5 if want[i] > 0 else want[i] * 1.5
    for i in set(outputs):
        want[i] -= 0.4 + 0.3 * outputs.count(i)
    got = x.clone()[None]
    s._penalise(got, np.array([0]), np.array([0]))
    assert torch.allclose(got[0], want)


def test_what_is_sampled_is_penalised_from_then_on():
    s = sampler()
    enter(s, 0, temperature=0.0, frequency_penalty=2.0)
    x = torch.zeros(1, VOCAB)
    x[0, 7], x[0, 8] = 3.0, 2.0
    assert [draw(s, x.clone(), [0], [i])[0][0] for i in range(4)] == [7, 8, 7, 0]


def test_logit_bias():
    s = sampler()
    enter(s, 0, temperature=0.0, logit_bias={3: 100.0})
    enter(s, 1, temperature=1.0, seed=5, logit_bias={i: -100.0 for i in range(VOCAB) if i != 4})
    assert draw(s, logits(2), [0, 1])[0] == [3, 4]


def test_end_tokens_cannot_come_before_min_tokens():
    s = sampler()
    enter(s, 0, temperature=0.0, min_tokens=2, stop_token_ids=(7, 9))
    x = torch.zeros(1, VOCAB)
    x[0, 7], x[0, 9], x[0, 11] = 5.0, 4.0, 3.0
    assert [draw(s, x.clone(), [0], [i])[0][0] for i in range(3)] == [11, 11, 7]


def test_log_probabilities_are_the_models_own():
    s = sampler()
    enter(s, 0, temperature=0.7, seed=3, logprobs=4, logit_bias={3: 50.0}, presence_penalty=1.0)
    enter(s, 1, temperature=0.0)
    enter(s, 2, temperature=0.0, logprobs=0)
    x = logits(3)
    want = x.log_softmax(-1)
    ids, explained = draw(s, x.clone(), [0, 1, 2])
    assert ids[0] == 3 and (explained.rows, explained.counts) == ([0, 2], [4, 0])
    assert explained.chosen.tolist() == pytest.approx([float(want[0, 3]), float(want[2].max())], abs=1e-5)
    assert explained.ids[0].tolist() == want[0].topk(4).indices.tolist()
    assert explained.values[0].tolist() == pytest.approx(want[0].topk(4).values.tolist(), abs=1e-5)


def test_a_row_keeps_nothing_of_the_sequence_before():
    s = sampler()
    enter(s, 0, temperature=0.0, repetition_penalty=2.0, logit_bias={3: 100.0}, logprobs=2)
    s.leave(0)
    enter(s, 0, temperature=0.0)
    x = logits(1)
    ids, explained = draw(s, x, [0])
    assert ids == x.argmax(-1).tolist() and explained is None


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_largest_of_logits_that_are_split(size):
    """Ties go to the first, also over a border; a rank may have nothing but padding."""
    width = -(-VOCAB // size) + 2
    whole = torch.full((50, size * width), -math.inf)
    whole[:, :VOCAB] = logits(50).round()  # many ties
    want = whole.argmax(-1)
    assert (whole == whole.amax(-1, keepdim=True)).sum() > 60

    def one(comm):
        shard = whole[:, comm.rank * width : (comm.rank + 1) * width]
        return tp_argmax(shard, comm), tp_argmax(shard[:0], comm)

    for ids, none in threads.run(one, size):
        assert ids.dtype == torch.int64 and torch.equal(ids, want) and len(none) == 0


def test_what_the_largest_logit_decides_alone():
    greedy = dict(max_tokens=9, temperature=0.0, stop_token_ids=(1,), seed=3, top_k=4, top_p=0.5)
    assert is_plain_greedy(protocol.SamplingParams(**greedy)) and is_plain_greedy(
        protocol.SamplingParams(**greedy | {"temperature": 1e-6})
    )
    for more in (
        {"temperature": 0.1}, {"logprobs": 0}, {"logit_bias": {3: 1.0}}, {"min_tokens": 1}, {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1}, {"frequency_penalty": -0.1},
    ):  # fmt: skip
        assert not is_plain_greedy(protocol.SamplingParams(**greedy | more)), more


def test_rows_are_sampled_in_groups_where_memory_runs_out(monkeypatch):
    """Rows alone get the ids and log-probabilities of all together; a row that cannot be sampled alone is reported."""
    count, rng = 11, np.random.default_rng(5)
    bits = torch.from_numpy(rng.integers(1, 1 << 31, (3, 2), dtype=np.int64).astype(np.int32))
    masks = RowMasks(torch.tensor([1, 6, 7], dtype=torch.int32), bits)

    def filled():
        s = sampler()
        for row in range(count):
            enter(s, row, seed=row, temperature=row % 3 / 2, top_p=1 - row % 2 / 10, logprobs=row % 4 - 1,
                  frequency_penalty=row % 5 / 4, repeat_last_n=row % 3)  # fmt: skip
        return s

    rows, outputs = np.arange(count), np.zeros(count, np.int64)
    x = logits(count)
    whole, split = filled(), filled()
    want = [whole.sample(x.clone(), rows, outputs + i, masks) for i in range(3)]
    together = Sampler._sample_together
    groups = []

    def short_of_memory(self, logits, rows, *more):
        if len(rows) > 2 or 9 in rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        groups.append(rows.tolist())
        return together(self, logits, rows, *more)

    monkeypatch.setattr(Sampler, "_sample_together", short_of_memory)
    got = [split.sample(x.clone(), rows, outputs + i, masks) for i in range(3)]
    assert max(map(len, groups)) == 2
    for one, other in zip(want, got, strict=True):
        assert other.failed == [9] and one.failed == []
        kept = [i for i in range(count) if i != 9]
        assert one.ids[kept].tolist() == other.ids[kept].tolist()
        shown = [i for i, row in enumerate(one.logprobs.rows) if row != 9]
        assert other.logprobs.rows == [one.logprobs.rows[i] for i in shown]
        assert other.logprobs.counts == [one.logprobs.counts[i] for i in shown]
        torch.testing.assert_close(other.logprobs.chosen, one.logprobs.chosen[shown])
        for i, (at, most) in enumerate(zip(shown, other.logprobs.counts, strict=True)):
            torch.testing.assert_close(other.logprobs.values[i, :most], one.logprobs.values[at, :most])
            assert other.logprobs.ids[i, :most].tolist() == one.logprobs.ids[at, :most].tolist()


def test_a_sequence_that_cannot_be_counted_fails_alone(monkeypatch):
    s = sampler()
    count = s._count

    def fail(row, new):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(s, "_count", fail)
    enter(s, 0, frequency_penalty=1.0)
    monkeypatch.setattr(s, "_count", count)
    enter(s, 1, frequency_penalty=1.0)
    assert s.sample(logits(2), np.array([0, 1]), np.zeros(2, np.int64)).failed == [0]
    enter(s, 0, frequency_penalty=1.0)
    assert s.sample(logits(2), np.array([0, 1]), np.zeros(2, np.int64)).failed == []


def test_counts_stop_at_what_their_type_holds():
    s = sampler()
    enter(s, 0, [1] + [5] * 40_000, prompt_len=1, temperature=0.0, frequency_penalty=-2.0)
    for _ in range(2):
        assert draw(s, logits(1), [0])[0] == [5]
    assert s._counts[0, 5] == 32_767


SEVERAL = {
    "greedy": dict(temperature=0.0),
    "drawn": dict(temperature=1.0, top_p=0.9, seed=5),
    "penalised": dict(temperature=1.0, seed=5, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.9),
    "of the newest tokens": dict(temperature=1.0, seed=6, repetition_penalty=3.0, repeat_last_n=3),
    "words": dict(temperature=0.7, seed=7, bad_words=[[4, 5], [3], [8, 9, 1]]),
    "thoughts": dict(temperature=1.0, seed=8, thinking_budget=3, thinking_tokens=(6, 7), thinking=True),
    "not yet": dict(temperature=1.0, seed=9, min_tokens=5, stop_token_ids=[2, 3, 4, 5, 6, 7, 8]),
}


def of_model(position, token):
    """A model's logits, of few tokens, which come again and again."""
    x = torch.randn(VOCAB, generator=torch.Generator().manual_seed(100 * position + token)) * 2
    return x.index_fill(0, torch.arange(12, VOCAB), -20.0)


def one_at_a_time(parameters, count):
    """Tokens of rows that have these parameters each."""
    s, found = sampler(), [[3] for _ in parameters]
    for row, one in enumerate(parameters):
        enter(s, row, tokens=(1, 2, 3), **one)
    for position in range(count):
        x = torch.stack([of_model(position, tokens[-1]) for tokens in found])
        ids, _ = draw(s, x, range(len(found)), [position] * len(found))
        for tokens, token in zip(found, ids, strict=True):
            tokens.append(token)
    return [tokens[1:] for tokens in found]


@pytest.mark.parametrize("query_len", [2, 4])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_several_tokens_of_a_row(query_len, right):
    """Drafts that are verified in one step give the tokens that one step each gives, however many are rejected."""
    rows, draws, count = len(SEVERAL), np.random.default_rng(3), 40
    want = one_at_a_time(SEVERAL.values(), count + query_len)
    s, found, rejected = sampler(), [[3] for _ in range(rows)], 0
    for row, one in enumerate(SEVERAL.values()):
        enter(s, row, tokens=(1, 2, 3), **one)
    while min(map(len, found)) <= count:
        x, at, outputs, drafts = [], [], [], []
        for row, tokens in enumerate(found):
            if len(tokens) > count:
                continue
            position = len(tokens) - 1
            length = 1 if draws.random() < 0.2 else query_len  # steps of one token come between
            true = want[row][position : position + length - 1]
            drafts.append([t if draws.random() < right else (t + 1) % VOCAB for t in true])
            fed = [tokens[-1], *drafts[-1]]
            x += [of_model(position + j, token) for j, token in enumerate(fed)]
            at += [row] * length
            outputs += range(position, position + length)
        ids, _ = draw(s, torch.stack(x), at, outputs)
        for row, drafted in zip(dict.fromkeys(at), drafts, strict=True):
            mine, ids = ids[: len(drafted) + 1], ids[len(drafted) + 1 :]
            kept = next((i for i, (a, b) in enumerate(zip(mine, drafted, strict=False)) if a != b), len(drafted))
            rejected += len(drafted) - kept
            found[row] += mine[: kept + 1]
    assert (rejected > 0) is (right < 1)
    for name, tokens, wanted in zip(SEVERAL, found, want, strict=True):
        assert tokens[1 : count + 1] == wanted[:count], name


def test_log_probabilities_and_masks_of_several_tokens_of_a_row():
    """Whether a row remembers tokens or not; what each has follows the order of the step."""
    s = sampler()
    for row, penalty in enumerate((0.0, 0.5, 0.0)):
        enter(s, row, temperature=0.0, logprobs=row, presence_penalty=penalty)
    rows, x = np.array([1, 1, 1, 0, 2, 2]), logits(6, seed=4)
    bits = torch.full((2, 2), -1, dtype=torch.int32)
    best = x.argmax(-1)
    bits[0, best[1] // 32] = ~(1 << int(best[1] % 32)) if best[1] % 32 < 31 else 0x7FFFFFFF
    bits[1, best[5] // 32] = ~(1 << int(best[5] % 32)) if best[5] % 32 < 31 else 0x7FFFFFFF
    sampled = s.sample(x.clone(), rows, np.array([0, 1, 2, 0, 0, 1]), RowMasks(torch.tensor([1, 5]).int(), bits))
    second = x.topk(2).indices[:, 1]
    assert sampled.ids[[0, 3, 4]].tolist() == best[[0, 3, 4]].tolist()
    assert sampled.ids[1] != best[1] and sampled.ids[5] == second[5]
    wanted = dict(enumerate(x.log_softmax(-1).gather(1, sampled.ids[:, None])[:, 0].tolist()))
    got = dict(zip(sampled.logprobs.rows, sampled.logprobs.chosen.tolist(), strict=True))
    assert got == pytest.approx(wanted)
    assert dict(zip(sampled.logprobs.rows, sampled.logprobs.counts, strict=True)) == {
        i: int(r) for i, r in enumerate(rows)
    }
