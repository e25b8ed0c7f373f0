"""Masks against brute force on a vocabulary of a few tokens, and grammars that are compiled beside the step loop."""

import itertools
import json
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from phalanx.rank import protocol
from phalanx.rank.scheduler import grammar as grammar_module
from phalanx.rank.scheduler.grammar import KEPT, Compiled, Grammars, masks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PIECES = ["a", "b", "c", "1", '"', "ab", "bc", "abc", '"a', "11"]
SIZE = 37  # of the model's vocabulary: the last tokens have no text


def tokenizer_json():
    """Byte-level BPE of these pieces; <end> is a special token."""
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ('"', "a"), ("1", "1")]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made.to_str()


END = len(PIECES)


@pytest.fixture(scope="module")
def compiled():
    return Compiled(protocol.Vocabulary(tokenizer_json(), SIZE, (END,)))


def sequence(compiled, pattern, **sampling):
    grammar = compiled.grammar(json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]}))
    params = protocol.SamplingParams(max_tokens=99, **{"stop_token_ids": (END,), **sampling})
    return SimpleNamespace(grammar=grammar, sampling=params, tokens=[0, 0], prompt_len=2, finished=False)


def allowed(*sequences):
    bits = np.frombuffer(masks(sequences), np.uint8).reshape(len(sequences), -1)
    found = np.unpackbits(bits, axis=1, bitorder="little")[:, :SIZE]
    return [set(np.flatnonzero(row).tolist()) for row in found]


def texts(pattern, longest=7):
    """All texts of up to so many characters that match."""
    every = ("".join(x) for n in range(longest + 1) for x in itertools.product("abc1", repeat=n))
    return [text for text in every if re.fullmatch(pattern, text)]


@pytest.mark.parametrize("pattern", ["a(b|c)*1", "(ab)*c", "abc|ab1|b", "a{2,3}b?", "(a|ab)(c|bcd)?", "1*", "[ab]c?1+"])
def test_masks_allow_what_goes_on_to_a_match(compiled, pattern):
    matches = texts(pattern)
    one = sequence(compiled, pattern)
    written = ""
    for turn in range(4):
        (found,) = allowed(one)
        if one.grammar.over:
            assert written in matches and not any(m.startswith(written) and m != written for m in matches)
            break
        rest = {m[len(written) :] for m in matches if m.startswith(written)}
        possible = {i for i, piece in enumerate(PIECES) if any(r.startswith(piece) for r in rest)}
        possible |= {END} if "" in rest else set()
        assert found <= possible and found
        if len({r[:1] for r in rest}) > 1:  # otherwise it may insist on the tokens that the tokenizer has for the text
            assert found == possible
        token = sorted(found - {END})[turn % len(found - {END})] if found - {END} else END
        if token == END:
            break
        one.tokens.append(token)
        written += PIECES[token]
        one.grammar.accept(token)


def test_tokens_that_end_are_allowed_where_it_accepts(compiled):
    free, early, other = (
        sequence(compiled, "1*", **more) for more in ({}, {"min_tokens": 1}, {"stop_token_ids": (0, 2)})
    )
    first, second, third = allowed(free, early, other)
    assert END in first and END not in second
    assert {0, 2} <= third and END not in third, "the request's own, and not the model's"
    early.tokens.append(3)
    early.grammar.accept(3)
    assert END in allowed(early)[0]


def test_masks_of_sequences_that_are_over_allow_everything(compiled):
    done, ended, live = (sequence(compiled, "a") for _ in range(3))
    done.finished = True
    assert ended.grammar.accept(0) == "stop"
    first, second, third = allowed(done, ended, live)
    assert first == second == set(range(SIZE)) and third == {0}
    assert masks([done]) == b"\xff" * 8


def test_a_token_that_is_not_allowed_is_an_error(compiled):
    one = sequence(compiled, "a+")
    assert one.grammar.accept(1) == "error" and one.grammar.accept(0) == "error"
    assert "the output's grammar cannot be followed further" in one.grammar.error


def test_sequences_of_one_grammar_do_not_share_their_place(compiled):
    first, second = (sequence(compiled, "ab1") for _ in range(2))
    first.grammar.accept(0)
    assert allowed(first)[0] <= {1} and allowed(second)[0] <= {0, 5}


def request(id, grammar='start: "a"'):
    return protocol.Request(id, b"", protocol.SamplingParams(max_tokens=1), grammar=grammar)


def take(grammars, count):
    found = {}
    until = time.monotonic() + 60
    while len(found) < count and time.monotonic() < until:
        found.update({one.id: grammar for one, grammar in grammars.take()})
        time.sleep(0.001)  # 1 ms: what the step loop waits is of that order
    return found


def test_compiling_beside_the_loop():
    grammars = Grammars()
    grammars.compile(request("early"))
    assert grammars.pending
    assert "the vocabulary is not known" in take(grammars, 1)["early"]
    grammars.know(protocol.Vocabulary(tokenizer_json(), SIZE, (END,)))
    grammars.compile(request("good"))
    grammars.compile(request("wrong", "start: ("))
    grammars.compile(request("left"))
    grammars.abort(["left", "never heard of"])
    found = take(grammars, 2)
    assert not isinstance(found["good"], str) and "the output cannot be constrained" in found["wrong"]
    assert not grammars.pending and take(grammars, 0) == {}
    threads = grammars._threads
    grammars.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_grammar_that_takes_long_blocks_no_other(monkeypatch):
    go, compile = threading.Event(), Compiled.grammar
    slow = lambda self, text: compile(self, text) if text != "slow" else go.wait(60)  # noqa: E731
    monkeypatch.setattr(Compiled, "grammar", slow)
    grammars = Grammars()
    grammars.know(protocol.Vocabulary(tokenizer_json(), SIZE, (END,)))
    monkeypatch.setattr(grammar_module, "LONGEST", 0.0)  # seconds: given up at the next look
    grammars.compile(request("long", "slow"))
    monkeypatch.setattr(grammar_module, "LONGEST", 60.0)
    for name in "abc":
        grammars.compile(request(name))
    found = take(grammars, 4)
    assert "not compiled within" in found.pop("long")
    assert not any(isinstance(one, str) for one in found.values()) and not grammars.pending
    go.set()
    grammars.close()
    for thread in grammars._threads:
        thread.join(20)
    assert take(grammars, 0) == {}


def test_what_is_under_way_at_the_end_is_given_up(monkeypatch):
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(Compiled, "grammar", lambda *_: begun.set() or go.wait(60))
    monkeypatch.setattr(grammar_module, "COMPILERS", 1)
    grammars = Grammars()
    grammars.know(protocol.Vocabulary(tokenizer_json(), SIZE, (END,)))
    grammars.compile(request("under way"))
    grammars.compile(request("not begun"))
    assert begun.wait(60)
    grammars.close()
    assert not grammars.pending
    go.set()
    for thread in grammars._threads:
        thread.join(20)
        assert not thread.is_alive()
    assert grammars.take() == []


def test_a_tokenizer_that_cannot_be_read():
    grammars = Grammars()
    grammars.know(protocol.Vocabulary("{}", SIZE, (END,)))
    grammars.compile(request("a"))
    assert "the output cannot be constrained" in take(grammars, 1)["a"]


def test_only_the_last_grammars_are_kept(compiled):
    for i in range(KEPT + 5):
        compiled.grammar(f'start: "a" /b{{{i}}}/')
    assert len(compiled._matchers) == KEPT
    compiled.grammar('start: "a" /b{260}/')
    assert next(reversed(compiled._matchers)) == 'start: "a" /b{260}/'
