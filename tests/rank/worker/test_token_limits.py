"""Allowed tokens, bad words and the thoughts' budget, which the sampler obeys before it samples."""

import math

import numpy as np
import pytest
import torch
from phalanx.rank import protocol
from phalanx.rank.worker.sampler import Sampler, is_plain_greedy

pytestmark = pytest.mark.timeout(60)
VOCAB, OPEN, CLOSE = 40, 30, 31


def enter(sampler, row, output=(), **limits):
    tokens = (1, 2, *output)
    sampling = protocol.SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **limits})
    assert not is_plain_greedy(sampling)
    sampler.enter(protocol.NewSequence(row, protocol.pack_u32(tokens), 2, 0, b"", sampling))


def run(sampler, wanted, rows=(0,)):
    """Tokens of rows whose likeliest tokens are these, step by step; the next likeliest is one more."""
    found = []
    for step, token in enumerate(wanted):
        logits = torch.zeros(len(rows), VOCAB)
        logits[:, token], logits[:, (token + 1) % VOCAB] = 9.0, 5.0
        ids, *_ = sampler.sample(logits, np.asarray(rows), np.full(len(rows), step))
        found.append(ids.tolist() if len(rows) > 1 else ids.item())
    return found


def sampler():
    return Sampler(4, VOCAB, torch.device("cpu"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_other_tokens_than_those_allowed(temperature):
    s = sampler()
    enter(s, 0, allowed_token_ids=(3, 5), temperature=temperature, seed=1)
    assert {*run(s, [3, 4, 7] * 5)} <= {3, 5} and run(s, [5, 3])[0] in (3, 5)
    s.leave(0)
    s.enter(protocol.NewSequence(0, protocol.pack_u32([1]), 1, 0, b"", protocol.SamplingParams(9, temperature=0.0)))
    assert run(s, [7]) == [7]  # the next sequence of the row


def test_words_that_are_never_said():
    s = sampler()
    enter(s, 0, bad_words=((7,), (3, 4), (3, 4, 5), (9, 9, 9)))
    assert run(s, [7]) == [8]
    assert run(s, [4, 3, 4, 4, 3, 3, 4]) == [4, 3, 5, 4, 3, 3, 5]
    assert run(s, [9, 9, 9, 9]) == [9, 9, 10, 9]
    enter(s, 0, output=(9, 9), bad_words=((9, 9, 9), (2, 8)))  # preempted within a word
    assert run(s, [9]) == [10]
    enter(s, 0, bad_words=((2, 8),))
    assert run(s, [8]) == [8]  # the prompt is no part of the output


def test_thoughts_are_closed_when_their_budget_is_spent():
    s = sampler()
    limits = {"thinking_budget": 3, "thinking_tokens": (OPEN, CLOSE)}
    enter(s, 0, thinking=True, **limits)
    assert run(s, [5] * 6) == [5, 5, 5, CLOSE, 5, 5]
    enter(s, 0, **limits)
    assert run(s, [5, 5, OPEN, 5, 5, 5, 5, 5]) == [5, 5, OPEN, 5, 5, 5, CLOSE, 5]
    enter(s, 0, thinking=True, **limits)
    assert run(s, [5, CLOSE, 5, 5, 5, 5]) == [5, CLOSE, 5, 5, 5, 5]
    enter(s, 0, thinking=True, **{**limits, "thinking_budget": 0})
    assert run(s, [5, 5]) == [CLOSE, 5]
    enter(s, 0, output=(5, 5), thinking=True, **limits)  # preempted
    assert run(s, [5, 5, 5]) == [5, CLOSE, 5]


def test_a_repetition_penalty_that_looks_back_only_so_far():
    s = sampler()

    def penalised(output=(), **more):
        sampling = protocol.SamplingParams(9, temperature=0.0, repetition_penalty=3.0, **more)
        tokens = protocol.pack_u32((3, 20, *output))
        s.enter(protocol.NewSequence(0, tokens, 2, 0, b"", sampling))

    penalised()
    assert run(s, [3]) == [4]
    penalised(repeat_last_n=1)
    assert run(s, [3, 3, 3]) == [3, 4, 3]
    penalised((7, 30), repeat_last_n=2)  # preempted
    assert run(s, [7, 3]) == [8, 3]
    penalised(repeat_last_n=100)  # more than there are
    assert run(s, [3]) == [4]
    s.leave(0)
    assert not s._windows


def test_rows_have_rules_of_their_own():
    s = sampler()
    enter(s, 0, bad_words=((7,),))
    enter(s, 1, allowed_token_ids=(2,), repetition_penalty=1.5)
    enter(s, 2, logit_bias={7: 1.0})
    assert run(s, [7, 8], rows=(2, 1, 0)) == [[7, 2, 8], [8, 2, 8]]


def test_log_probabilities_of_named_tokens():
    s = sampler()
    enter(s, 0, logprobs=1, logprob_token_ids=(4, 2))
    enter(s, 1, logprobs=1)
    x = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = x.log_softmax(-1)
    _, found, _ = s.sample(x.clone(), np.array([0, 1]), np.zeros(2))
    assert found.counts == [2, 1] and found.ids[0].tolist() == [4, 2]
    assert found.values[0].tolist() == pytest.approx(expected[0, [4, 2]].tolist())
    assert found.ids[1, 0] == x[1].argmax() and math.isfinite(found.chosen[0])
