"""Drafts of what a sequence repeats."""

import random

import pytest
from phalanx.rank.scheduler.ngram import KEPT, LONGEST_RUN, MANY, MAX_SALTS, Answers, N, Ngrams
from phalanx.rank.scheduler.sequence import Sequence

from .toy import request


def sequence(prompt, salt=""):
    return Sequence(request("a", prompt, 1000, salt=salt), 0, [])


def grown(one, drafts, tokens, most=4):
    """The drafts before each of these tokens."""
    found = []
    for token in tokens:
        found.append(drafts.draft(most))
        one.tokens.append(token)
        drafts.follow()
    return found


def brute_force(tokens, most):
    """The tokens that followed the newest N tokens where they were last."""
    for at in range(len(tokens) - 1, N - 1, -1):
        if tokens[at - N : at] == tokens[-N:]:
            return at
    return 0


@pytest.mark.parametrize("seed", range(20))
def test_against_brute_force(seed):
    """Small alphabets repeat often, and prompts are short and long."""
    r = random.Random(seed)
    letters = r.choice([2, 5, 30])
    one = sequence([r.randrange(letters) for _ in range(r.choice([1, 5, MANY + 40, 500]))])
    drafts, followed = Ngrams(one, Answers(), []), 0
    drafts.follow()
    for _ in range(300):
        before, found = drafts.run, drafts.draft(3)
        if found and before == N:  # it has begun here
            at = brute_force(one.tokens, 3)
            assert found[0] == one.tokens[at]
        one.tokens.append(found[0] if found and r.random() < 0.7 else r.randrange(letters))
        told = drafts.follow()
        if before:
            (length, went_on), *_ = told
            assert length == before and went_on == (one.tokens[-1] == found[0])
            followed += went_on
            if went_on:
                assert drafts.run == before + 1
        if not drafts.run:
            assert not brute_force(one.tokens, 3) or letters > 2
    assert followed


def test_a_document_that_is_repeated():
    document = random.Random(0).sample(range(10_000), 300)
    one = sequence([*document, 1, 2])
    drafts = Ngrams(one, Answers(), [])
    drafts.follow()
    found = grown(one, drafts, document)
    assert all(found[i] == document[i : i + 4] for i in range(N, 296))
    assert drafts.run > 200 and drafts.source == "ngram"


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end():
    one = sequence([1, 2, 3, 1, 2, 3, 1])
    drafts = Ngrams(one, Answers(), [])
    drafts.follow()
    assert drafts.draft(7) == [2, 3, 1, 2, 3, 1, 2]


def test_how_far_a_place_is_equal():
    prompt = list(range(100))
    one = sequence([*prompt, 1000, *prompt[:50]])
    drafts = Ngrams(one, Answers(), [])
    drafts.follow()
    assert drafts.run == LONGEST_RUN


def test_a_prediction():
    """It is followed from its beginning, and found again behind what was changed."""
    prediction = list(range(100, 140))
    one = sequence([1, 2, 3])
    drafts = Ngrams(one, Answers(), prediction)
    drafts.follow()
    assert drafts.draft(3) == [100, 101, 102] and drafts.source == "prediction"
    found = grown(one, drafts, [*prediction[:10], 7, 8, *prediction[12:30]])
    assert found[9][0] == 109 and found[12] == [] and found[15] == [115, 116, 117, 118]


def test_earlier_answers_of_the_same_salt():
    answers = Answers()
    answers.add("a", list(range(50)))
    answers.add("a", list(range(200, 205)))
    for salt, expected in (("a", [203, 204]), ("b", []), ("", [])):
        one = sequence([1, 200, 201, 202], salt)
        drafts = Ngrams(one, answers, [])
        drafts.follow()
        assert drafts.draft(5) == expected  # not into the next answer
        assert not expected or drafts.source == "answers"


def test_earlier_answers_are_bounded():
    answers = Answers()
    for i in range(40):
        answers.add("", list(range(i * 10_000, (i + 1) * 10_000)))
    (index,) = answers._by_salt.values()
    assert len(index.tokens) <= KEPT and answers.find("", [399_990, 399_991, 399_992])[1] > 0
    assert answers.find("", [1, 2, 3]) is None
    for i in range(3 * MAX_SALTS):
        answers.add(str(i), [1])
    assert len(answers._by_salt) == MAX_SALTS


def test_tokens_that_come_many_at_once():
    one = sequence(list(range(20)))
    drafts = Ngrams(one, Answers(), [])
    drafts.follow()
    one.tokens += [*range(300, 300 + 3 * MANY), 5, 6, 7]
    assert drafts.follow() == [] and drafts.draft(2) == [8, 9]
