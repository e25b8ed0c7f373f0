"""Masks against brute force on a vocabulary of a few tokens, and the processes that compute them."""

import itertools
import json
import os
import re
import signal
import time

import llguidance
import numpy as np
import pytest
from phalanx.rank import protocol
from phalanx.rank.scheduler import grammar as grammar_module
from phalanx.rank.scheduler.grammar import MAX_WORKERS, Grammars, accept, masks
from phalanx.rank.scheduler.grammar_process import Compiler, mask_words
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ... import retries
from .uniform import compile_all

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


VOCABULARY = protocol.Vocabulary(tokenizer_json(), SIZE, (END,))


@pytest.fixture(scope="module")
def compiler():
    tokenizer = llguidance.LLTokenizer(VOCABULARY.tokenizer, n_vocab=SIZE, eos_token=[END])
    return Compiler(tokenizer, VOCABULARY.ends)


def lark(pattern):
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})


def matcher(compiler, pattern, stops=(END,), min_tokens=0):
    return compiler.matcher(lark(pattern), stops, min_tokens)


def allowed(one):
    bits = np.full(mask_words(VOCABULARY), -1, np.int32)
    one.mask(bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE]).tolist())


def texts(pattern, longest=7):
    """All texts of up to so many characters that match."""
    every = ("".join(x) for n in range(longest + 1) for x in itertools.product("abc1", repeat=n))
    return [text for text in every if re.fullmatch(pattern, text)]


@pytest.mark.parametrize("stops", [(END,), ()])
def test_no_text_follows_drafts_that_complete_it(compiler, stops):
    """A scheduler that does not know yet that the text is complete shows what is sampled behind it."""
    one = matcher(compiler, "a(b|c)1", stops)
    bits = np.full((4, mask_words(VOCABULARY)), -1, np.int32)
    one.mask(bits[0])
    one.masks_behind([PIECES.index(piece) for piece in ("ab", "1", "c")], bits)
    found = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:SIZE]).tolist() for row in bits]
    assert found[1:] == [[PIECES.index("1")], [END], [END]]


@pytest.mark.parametrize("pattern", ["a(b|c)*1", "(ab)*c", "abc|ab1|b", "a{2,3}b?", "(a|ab)(c|bcd)?", "1*", "[ab]c?1+"])
def test_masks_allow_what_goes_on_to_a_match(compiler, pattern):
    matches = texts(pattern)
    one = matcher(compiler, pattern)
    written = ""
    for turn in range(4):
        found = allowed(one)
        if one.over:
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
        written += PIECES[token]
        one.take([token])


def test_tokens_that_end_are_allowed_where_it_accepts(compiler):
    free, early = matcher(compiler, "1*"), matcher(compiler, "1*", min_tokens=1)
    other = matcher(compiler, "1*", stops=(0, 2))
    assert END in allowed(free) and END not in allowed(early)
    last = allowed(other)
    assert {0, 2} <= last and END not in last  # the request's own, and not the model's
    early.take([3])
    assert END in allowed(early)


def test_a_complete_text_is_over_at_once(compiler):
    one = matcher(compiler, "a")
    one.take([0])
    assert (one.over, one.count) == ("stop", 1)
    endless = matcher(compiler, "a", stops=())
    endless.take([0])
    assert endless.over == "stop"


def test_a_text_that_has_to_follow_is_computed_once(compiler, monkeypatch):
    one, computed = matcher(compiler, "(abc){40}1*"), []

    class Counting:
        def __getattr__(self, name):
            if name == "compute_ff_tokens":
                computed.append(one.count)
            return getattr(inner, name)

    inner, one._matcher = one._matcher, Counting()
    abc = PIECES.index("abc")
    for left in range(40, 0, -1):
        assert one.forced() == [abc] * min(left, protocol.MAX_DRAFTS + 1)
        one.take([abc])
    assert one.forced() == [] and computed == [0, 40]
    one.take([PIECES.index("1")])
    assert one.forced() == [] and computed[-1] == 41  # another text may follow behind a choice


def test_a_token_that_is_not_allowed_is_an_error(compiler):
    one = matcher(compiler, "a+")
    one.take([1, 0])
    assert (one.over, one.count) == ("error", 1) and "cannot be followed further" in one.error


def test_a_schema_that_nothing_satisfies_is_an_error_that_says_so(compiler):
    one = compiler.matcher(json.dumps({"grammars": [{"json_schema": {"$ref": "#"}}]}), (END,), 0)
    allowed(one)
    assert one.over == "error" and "schema" in one.error and "NoExtensionBias" not in one.error


def test_sequences_of_one_grammar_do_not_share_their_place(compiler):
    first, second = (matcher(compiler, "ab1") for _ in range(2))
    first.take([0])
    assert allowed(first) <= {1} and allowed(second) <= {0, 5}


def test_grammars_are_kept_by_the_memory_they_take(compiler):
    tokenizer = llguidance.LLTokenizer(VOCABULARY.tokenizer, n_vocab=SIZE, eos_token=[END])
    roomy = Compiler(tokenizer, VOCABULARY.ends)
    for i in range(3):
        roomy.matcher(lark(f"b{{{i + 1}}}"), (), 0)
    with pytest.raises(ValueError):
        roomy.matcher("start: (", (), 0)
    roomy.matcher(lark("b{1}"), (), 0)
    roomy.trim()
    assert [*roomy.kept] == [lark("b{2}"), lark("b{3}"), lark("b{1}")]  # no failed one, the newest last
    tight = Compiler(tokenizer, VOCABULARY.ends, cache_bytes=-(1 << 40))
    tight.matcher(lark("b{1}"), (), 0)
    tight.trim()
    assert not tight.kept


# -- the processes


@pytest.fixture
def grammars():
    made = Grammars()
    made.know(VOCABULARY)
    yield made
    made.close()


def request(id, grammar='start: "a"', owner=""):
    params = protocol.SamplingParams(max_tokens=50, stop_token_ids=(END,))
    return protocol.Request(id, b"", params, grammar=grammar, owner=owner)


def process(grammars, owner=""):
    return grammars._pool.worker(owner).process


def wait_for(grammars, condition):
    until = time.monotonic() + 60
    ended = []
    while not condition() and time.monotonic() < until:
        ended += grammars.take()[1]
        time.sleep(0.002)  # 2 ms, as the loop does
    assert condition()
    return ended


class Holder:
    """A sequence, as masks are asked for it."""

    finished = False

    def __init__(self, grammar):
        self.grammar = grammar

    def allowed(self):
        bits = np.frombuffer(masks([self]), np.uint8)
        return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")[:SIZE]).tolist())


# Its first three tokens are found at once. What follows takes much longer.
BOMB = lark("[abc]{3}((a{999}){999}){9}")


def test_compiling_beside_the_loop():
    grammars = Grammars()
    assert "vocabulary" in compile_all(grammars, [request("early")])["early"]
    grammars.know(VOCABULARY)
    grammars.compile(request("left"))
    grammars.abort(["left", "never heard of"])
    found = compile_all(grammars, [request("good"), request("wrong", "start: (")])
    assert not isinstance(found["good"], str) and "constrained" in found["wrong"]
    assert Holder(found["good"]).allowed() == {0}
    assert [token for token in (*range(SIZE), 1 << 20) if found["good"].allows(token)] == [0]
    assert not grammars.pending and grammars.take() == ([], [])
    pid = process(grammars).pid
    grammars.close()
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.01)  # 10 ms, until the system has cleared it away
    assert not os.path.exists(f"/proc/{pid}")


def test_what_is_sampled_of_those_that_are_over_counts_for_nothing(grammars):
    made = compile_all(grammars, [request("done"), request("ended", lark("a"))])
    done, ended = Holder(made["done"]), Holder(made["ended"])
    done.finished = True
    accept([(ended.grammar, [0])])
    assert (ended.grammar.over, ended.grammar.ended_at) == ("stop", 1)
    assert done.allowed() == ended.allowed() == set(range(SIZE)) and ended.grammar.allows(5)
    assert masks([done]) == b"\xff" * 8


def test_a_tokenizer_that_cannot_be_read():
    grammars = Grammars()
    grammars.know(protocol.Vocabulary("{}", SIZE, (END,)))
    assert "constrained" in compile_all(grammars, [request("a")])["a"]
    grammars.close()


def test_each_key_has_a_process_and_many_share(grammars):
    owners = [f"key {i}" for i in range(MAX_WORKERS + 2)]
    found = compile_all(grammars, [request(owner, owner=owner) for owner in owners])
    assert len({process(grammars, owner).pid for owner in owners}) == MAX_WORKERS
    for grammar in found.values():
        grammar.drop()
    compile_all(grammars, [request("late", owner="another")])
    assert len(grammars._pool._by_fd) == MAX_WORKERS  # one that nobody used was ended


def test_a_key_that_compiles_long_holds_up_no_other(grammars, monkeypatch):
    compile_all(grammars, [request("a", owner="slow")])
    os.kill(process(grammars, "slow").pid, signal.SIGSTOP)
    monkeypatch.setattr(grammar_module, "LONGEST", 0.0)  # seconds: given up at the next look
    grammars.compile(request("long", lark("b"), "slow"))
    monkeypatch.setattr(grammar_module, "LONGEST", 60.0)
    found = compile_all(grammars, [request(name, owner="quick") for name in "abc"])
    assert "not compiled within" in found.pop("long")
    assert [*found] == [*"abc"] and not any(isinstance(one, str) for one in found.values())
    assert not grammars.pending


def test_a_process_that_ends_takes_no_sequence_with_it(grammars):
    made = compile_all(grammars, [request("a", lark("[ab]+c")), request("b", lark("1+"))])
    first, second = Holder(made["a"]), Holder(made["b"])
    accept([(first.grammar, [0]), (second.grammar, [3])])
    before = first.allowed(), second.allowed()
    old = process(grammars).pid
    os.kill(old, signal.SIGKILL)
    grammars.compile(request("c"))
    wait_for(grammars, lambda: not grammars.busy and process(grammars).pid != old)
    assert (first.allowed(), second.allowed()) == before, "its tokens were replayed"


@retries.CLOCKS
def test_masks_that_are_late_are_not_waited_for_again(grammars):
    one = Holder(compile_all(grammars, [request("a", lark("[ab]{9}"))])["a"])
    os.kill(process(grammars).pid, signal.SIGSTOP)
    accept([(one.grammar, [0])])
    assert not one.grammar.ready and not one.grammar.planned_ahead
    began = time.monotonic()
    accept([(one.grammar, [1])])
    assert time.monotonic() - began < grammar_module.LATE, "it was late before"
    os.kill(process(grammars).pid, signal.SIGCONT)
    wait_for(grammars, lambda: one.grammar.ready)
    assert one.grammar.tokens == [0, 1] and not one.grammar.over
    one.grammar.worker.prompt_at = 0.0
    time.sleep(2 * grammar_module.LOOK_EVERY)  # until it may be looked at again
    grammars._pool.poll()
    assert one.grammar.planned_ahead  # after some time it may be late again


def test_a_mask_that_takes_too_long_ends_its_sequence_alone(grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "MASK_LIMIT", 0.02)  # seconds, of the more than 0.1 that it takes
    good = Holder(compile_all(grammars, [request("good", lark("[ab]{9}"))])["good"])
    accept([(good.grammar, [0])])
    old = process(grammars).pid
    for i in range(20):  # where this process rested in the meantime, the mask was found
        bomb = compile_all(grammars, [request(str(i), BOMB)])[str(i)]
        accept([(bomb, [7])])
        ended = wait_for(grammars, lambda bomb=bomb: bomb.ready and good.grammar.ready)
        if bomb.over:
            break
    assert ended == [bomb] and bomb.over == "error" and "next token" in bomb.error
    assert good.allowed() <= {0, 1, 5} and not good.grammar.over and process(grammars).pid != old


def test_a_grammar_that_compiles_too_long_ends_alone(grammars, monkeypatch):
    monkeypatch.setattr(grammar_module, "COMPILE_LIMIT", 0.2)  # seconds, of the many that it takes
    bomb = json.dumps({"grammars": [{"json_schema": {"type": "integer", "multipleOf": 999983}}]})
    found = compile_all(grammars, [request("before"), request("bomb", bomb), request("behind")])
    assert "to compile" in found["bomb"]
    assert not isinstance(found["before"], str)
    assert not isinstance(found["behind"], str)


def test_pythons_that_lack_linux_calls(grammars, without_linux_calls):
    one = Holder(compile_all(grammars, [request("a", lark("[ab]{9}"))])["a"])
    accept([(one.grammar, [0])])
    wait_for(grammars, lambda: one.grammar.ready)
    assert one.allowed() == {0, 1, 5}


def test_another_vocabulary_ends_what_is_open(grammars):
    running = Holder(compile_all(grammars, [request("running", lark("[ab]{9}"))])["running"])
    os.kill(process(grammars).pid, signal.SIGSTOP)
    grammars.compile(request("open"))
    grammars.know(VOCABULARY)  # the same one changes nothing
    assert grammars.pending and not running.grammar.over
    os.kill(process(grammars).pid, signal.SIGCONT)
    grammars.know(protocol.Vocabulary(tokenizer_json(), SIZE + 1, (END,)))
    assert grammars.busy
    ((refused, error),), ended = grammars.take()
    assert refused.id == "open"
    assert error.status == 503
    assert "vocabulary" in str(error)
    assert running.grammar in ended and running.grammar.over == "error" and running.grammar.status == 503
    accept([(running.grammar, [0])])  # a step that was under way
    assert masks([running]) == grammars._pool.everything
    running.grammar.drop()
    assert not grammars.busy and not isinstance(compile_all(grammars, [request("new")])["new"], str)


def test_memory_is_limited(grammars):
    compile_all(grammars, [request("a")])
    with open(f"/proc/{process(grammars).pid}/limits") as file:
        limits = {line[:25].strip(): line[25:].split()[0] for line in file}
    assert int(limits["Max data size"]) < 1 << 32
    assert limits["Max core file size"] == "0"
