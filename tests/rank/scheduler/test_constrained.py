"""Constrained sequences through scheduler, plans and masks, continued by ranks that draw evenly what is allowed."""

import functools
import json
import os
import random
import re
import signal

import jsonschema
import pytest
from phalanx.launcher.builtin_model import DIRECTORY
from phalanx.rank import protocol
from phalanx.rank.scheduler import grammar as grammar_module
from phalanx.rank.scheduler.grammar import Grammars
from phalanx.rank.server.constraint import Constraint, checked, json_schema
from phalanx.rank.server.text.load import Text

from .schemas import random_schema
from .uniform import Uniform

SCHEMAS = 500
VOCAB = 4040  # the tokenizer's and some without a text, as models have them


@pytest.fixture(scope="module")
def text():
    return Text(str(DIRECTORY))


@pytest.fixture
def grammars(text):
    made = Grammars()
    made.know(text.vocabulary(VOCAB))
    yield made
    made.close()


@pytest.fixture
def engine(text, grammars):
    closing = [i for i in range(text.tokenizer.size) if text.tokenizer.piece(i) in (b'"', b"}", b"]", b'"}', b"}}")]
    return functools.partial(Uniform, VOCAB, eager=[*closing, *text.end_tokens], grammars=grammars)


def grammar(part):
    return json.dumps({"grammars": [checked(Constraint("x", part))]})


def regex(pattern):
    return grammar({"lark_grammar": f"start: /{pattern}/"})


@pytest.mark.parametrize("stages", [1, pytest.param(3, marks=pytest.mark.long)])
def test_every_text_that_is_complete_is_valid(text, engine, stages):
    one = engine(seed=stages, stages=stages)
    schemas = {}
    for i in range(SCHEMAS // 2):
        schema = schemas[str(i)] = random_schema(random.Random(1000 * stages + i))
        made = grammar(json_schema("x", schema).part)
        one.add(str(i), [1, 2, 3 + i % 5], made, 120, stop_token_ids=text.end_tokens)
    one.run()
    complete = 0
    for name, schema in schemas.items():
        written = b"".join(map(text.tokenizer.piece, one.tokens.get(name, []))).decode(errors="replace")
        end = one.ends[name]
        if end.finish == "length":
            assert len(one.tokens[name]) == 120
            continue
        assert end.finish == "stop", (end, schema)
        complete += 1
        jsonschema.validate(
            json.loads(written), schema, jsonschema.Draft202012Validator,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )  # fmt: skip
    assert complete > SCHEMAS // 4  # the test shows nothing if nearly all texts are cut


def test_preemptions_aborts_and_free_neighbours(text, engine):
    """Few blocks: sequences lose their rows while tokens and masks are under way."""
    one = engine(seed=5, blocks=17, max_num_seqs=8, stages=2)
    r = random.Random(3)
    for i in range(40):
        made = None if i % 4 == 0 else regex("([a-z]{3} ){20,24}[0-9]{2}")
        one.add(str(i), [1] * r.randint(1, 40), made, r.choice([30, 200]), stop_token_ids=text.end_tokens)
    aborted = set()
    while not one.replica.idle:
        one.step()
        if r.random() < 0.02 and one.scheduler.running:
            victim = r.choice(one.scheduler.running).id
            one.scheduler.abort([victim])
            aborted.add(victim)
    one.scheduler.check_empty()
    assert one.scheduler.counters.preemptions > 3 and aborted
    finished = 0
    for i in range(40):
        if i % 4 and str(i) not in aborted and one.ends[str(i)].finish == "stop":
            written = b"".join(map(text.tokenizer.piece, one.tokens[str(i)])).decode()
            assert written.split()[-1].isdecimal() and 21 <= len(written.split()) <= 25
            finished += 1
    assert finished


def test_without_constraints_no_masks_are_sent(engine):
    one = engine()
    one.add("a", [1, 2], None, 20)
    one.run()
    assert one.ranks.masked == 0 and len(one.tokens["a"]) == 20


def test_a_complete_text_ends_without_an_end_token(text, engine):
    one = engine()
    one.add("ends", [1], regex("[0-9]{4}"), stop_token_ids=text.end_tokens)
    one.add("no ends", [1], regex("[0-9]{4}"))
    one.add("too few", [1], regex("[0-9]{4}"), min_tokens=50, stop_token_ids=text.end_tokens)
    one.run()
    for name, tokens in one.tokens.items():
        assert len(b"".join(map(text.tokenizer.piece, tokens))) == 4
        assert (one.ends[name].finish, one.ends[name].stop_token) == ("stop", -1)


def test_min_tokens_and_the_limit(text, engine):
    one = engine()
    one.add("more", [1], regex("[0-9]*"), min_tokens=20, stop_token_ids=text.end_tokens)
    one.add("cut", [1], regex("[0-9]{90}"), 10, stop_token_ids=text.end_tokens)
    one.run()
    assert one.ends["more"].finish == "stop" and len(one.tokens["more"]) >= 20
    assert one.ends["cut"].finish == "length" and len(one.tokens["cut"]) == 10


def test_a_stop_token_of_the_request_ends_only_what_is_complete(text, engine):
    """Its own text would be allowed at the second place, but it is no text for this request."""
    (five,) = [i for i in range(text.tokenizer.size) if text.tokenizer.piece(i) == b"5"]
    one = engine()
    for i in range(20):
        one.add(str(i), [1], regex("1[0-9]{2}(x[0-9])?"), stop_token_ids=(five,))
    one.run()
    for i in range(20):
        written = b"".join(map(text.tokenizer.piece, one.tokens[str(i)])).decode()
        assert one.ends[str(i)].finish == "stop"
        assert len(written) in (3, 5)
        assert "5" not in written


def test_a_grammar_that_asks_for_too_much_ends_alone(text, engine, monkeypatch):
    """Its first character costs nothing. The mask after it takes long, and llguidance gives up, if it gets so far."""
    monkeypatch.setattr(grammar_module, "MASK_LIMIT", 0.1)  # seconds
    one = engine(stages=2)
    one.add("bomb", [1], regex("[xyz]bcdef((a{999}){999}){9}"))
    one.add("good", [1], regex("[a-z]{60}"), stop_token_ids=text.end_tokens)
    one.add("free", [1, 2], None, 50)
    one.run()
    end = one.ends["bomb"]
    assert (end.finish, end.status) == ("error", 400) and end.error
    assert len(b"".join(map(text.tokenizer.piece, one.tokens["good"]))) == 60
    assert one.ends["good"].finish == "stop"
    assert len(one.tokens["free"]) == 50


@pytest.mark.parametrize("stages", [1, 2])
def test_steps_go_on_without_masks_that_are_late(text, engine, grammars, stages):
    one = engine(stages=stages)
    for i in range(4):
        one.add(str(i), [1] * 20, regex("[a-z]{90}"), 100, stop_token_ids=text.end_tokens)
    one.add("free", [1, 2], None, 400)
    while len(one.tokens.get("3", ())) < 5:
        one.step()
    (pid,) = {worker.process.pid for worker in grammars._pool._workers.values()}
    os.kill(pid, signal.SIGSTOP)
    held, free = sum(map(len, one.tokens.values())) - len(one.tokens["free"]), len(one.tokens["free"])
    while len(one.tokens["free"]) < free + 50:
        one.step()
        one.scheduler.check([step for step, _ in one.replica._in_flight])
    assert sum(map(len, one.tokens.values())) - len(one.tokens["free"]) <= held + 4 * stages
    assert one.scheduler.counters.preemptions
    os.kill(pid, signal.SIGCONT)
    one.run()
    for i in range(4):
        written = b"".join(map(text.tokenizer.piece, one.tokens[str(i)])).decode()
        assert len(written) == 90 and written.isalpha() and one.ends[str(i)].finish == "stop"


@pytest.mark.parametrize("stages", [1, 2])
def test_processes_that_end_cost_no_sequence(text, engine, grammars, stages):
    one = engine(stages=stages, seed=3)
    for i in range(6):
        one.add(str(i), [1] * 20, regex("([a-z]{3} ){9}[0-9]{3}"), 100, stop_token_ids=text.end_tokens)
    for count in (3, 6):
        while len(one.tokens.get("5", ())) < count:
            one.step()
        (pid,) = {worker.process.pid for worker in grammars._pool._workers.values()}
        os.kill(pid, signal.SIGKILL)
    one.run()
    for i in range(6):
        written = b"".join(map(text.tokenizer.piece, one.tokens[str(i)])).decode()
        assert re.fullmatch("([a-z]{3} ){9}[0-9]{3}", written), written


def test_the_wire_carries_masks():
    masks = protocol.Masks(7, b"\x01\x02\x03\x04")
    assert protocol.decode_plan(protocol.encode_plan(masks)) == masks
    plan = protocol.Plan(step=3, rows=b"\0\0")
    assert protocol.decode_plan(protocol.encode_plan(plan)) == plan
