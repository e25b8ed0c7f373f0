"""Constrained sequences on live ranks: tensor groups, pipeline stages and replicas, with the built-in model."""

import json
import math

import jsonschema
import pytest
from phalanx.launcher.builtin_model import DIRECTORY
from phalanx.rank import protocol
from phalanx.rank.server.answer_grammar import Calls, answer_grammar
from phalanx.rank.server.constraint import choice, json_schema, regex
from phalanx.rank.server.text.load import Text

from ..engine import Engine

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_age", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def text():
    return Text(str(DIRECTORY))


def grammar(text, constraint=None, calls=None):
    return answer_grammar(text, constraint, calls, None)


def ask(engine, text, asked, **sampling):
    """Texts and outputs by name. asked: (constraint or calls, more of sampling) by name."""
    tokens = text.tokenizer.encode("Tell me about Anna.", False)
    requests = []
    for name, (constraint, calls, more) in asked.items():
        values = {"max_tokens": 150, "stop_token_ids": text.end_tokens, **sampling, **more}
        made = grammar(text, constraint, calls) if constraint or calls else ""
        packed = protocol.pack_u32(tokens)
        requests.append(protocol.Request(name, packed, protocol.SamplingParams(**values), grammar=made))
    engine.send(text.vocabulary(engine.ready.vocab_size), *requests)
    outputs = engine.collect(asked)
    return {name: text.tokenizer.decode(one.tokens) for name, one in outputs.items()}, outputs


LAYOUTS = [
    pytest.param(1, dict(threads=True), id="alone", marks=pytest.mark.long),
    pytest.param(2, dict(tp=2, pp=1), id="tp"),
    pytest.param(2, dict(tp=1, pp=2), id="pp"),
    pytest.param(2, dict(tp=1, dp=2), id="dp", marks=pytest.mark.long),
    pytest.param(4, dict(tp=2, pp=2), id="tp and pp", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def drawn():
    """Text that each seed has given: the same on all layouts."""
    return {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks, layout", LAYOUTS)
def test_answers_keep_to_what_was_asked(text, drawn, ranks, layout):
    hot = {"temperature": 5.0}
    asked = {
        "greedy": (json_schema("x", SCHEMA), None, {"temperature": 0.0}),
        "hot": (json_schema("x", SCHEMA), None, {**hot, "seed": 3, "max_tokens": 60}),
        "regex": (regex("x", r"\d{3}-[a-c]{2}"), None, {"temperature": 0.0}),
        "choice": (choice("x", ["yes", "no", "maybe"]), None, {**hot, "seed": 1}),
        "bias": (regex("x", "[ab]{8}"), None, {"temperature": 0.0, "presence_penalty": 1.0, "min_tokens": 2}),
        "call": (None, Calls([TOOL], True, False), {"temperature": 0.0}),
        "explained": (regex("x", "[0-9]{4}"), None, {"temperature": 0.0, "logprobs": 3}),
        "free": (None, None, {"temperature": 0.0, "max_tokens": 30}),
    }
    with Engine(DIRECTORY, ranks, **layout) as engine:
        found, outputs = ask(engine, text, asked)
        alone, _ = ask(engine, text, {"free": (None, None, {"temperature": 0.0, "max_tokens": 30})})
        assert found["free"] == alone["free"]
        for name in ("greedy", "hot"):
            if outputs[name].finish == "stop":
                jsonschema.validate(json.loads(found[name]), SCHEMA)
        assert outputs["greedy"].finish == "stop"
        assert (
            found["regex"][3] == "-" and found["choice"] in ("yes", "no", "maybe") and set(found["bias"]) <= set("ab")
        )
        assert '{"name": "get_age", "arguments":' in found["call"]
        assert found["call"].endswith("}\n</tool_call>")
        shown = outputs["explained"].logprobs
        assert found["explained"].isdecimal()
        assert len(shown) == len(outputs["explained"].tokens)
        best = [entry.top[0] for entry in shown]
        assert all(math.isfinite(value) for _, value in best)  # the model's own, before the mask
        assert any(token != entry.token for (token, _), entry in zip(best, shown, strict=True))
        assert all(outputs[name].finish for name in asked)
        abort_in_the_middle(engine, text)
        assert drawn.setdefault("texts", found) == found  # layouts must not change what is drawn


def abort_in_the_middle(engine, text):
    endless = answer_grammar(text, regex("x", "[a-z ]*[0-9]"), None, None)
    params = protocol.SamplingParams(max_tokens=1000, stop_token_ids=text.end_tokens, logit_bias={})
    names = [f"endless {i}" for i in range(4)]
    engine.send(*(protocol.Request(name, protocol.pack_u32([5, 6]), params, grammar=endless) for name in names))
    seen = set()
    for message in engine.messages():
        if isinstance(message, protocol.Deltas):
            seen |= {delta.id for delta in message.deltas}
        if seen >= set(names):
            break
    engine.send(protocol.Abort(names))
    after, outputs = ask(engine, text, {"after": (regex("x", "[0-9]{3}"), None, {})})
    assert outputs["after"].finish == "stop" and after["after"].isdecimal()


def _object(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TRIVIAL = [
    _object(name={"type": "string", "maxLength": 20}, age={"type": "integer", "maximum": 99}),
    _object(ok={"type": "boolean"}),
    _object(a=_object(b={"type": "null"})),
    _object(x={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}, y={"enum": [1, 2]}),
    {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "minItems": 3, "maxItems": 3},
    {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4},
    {"type": "boolean"},
    {"enum": ["red", "green"]},
]


@pytest.mark.timeout(300)
def test_a_small_model_comes_to_the_end_of_trivial_schemas(text):
    asked = {
        f"{i} at {heat}": (json_schema("x", schema), None, {"temperature": heat, "seed": 7, "max_tokens": 100})
        for i, schema in enumerate(TRIVIAL)
        for heat in (0.0, 1.0)
    }
    with Engine(DIRECTORY, 1, threads=True) as engine:
        found, outputs = ask(engine, text, asked)
    assert [name for name, one in outputs.items() if one.finish != "stop"] == []
    for name, words in found.items():
        jsonschema.validate(json.loads(words), TRIVIAL[int(name[0])])


@pytest.mark.timeout(300)
def test_what_cannot_be_compiled_is_told_and_a_drain_waits_for_grammars(text):
    with Engine(DIRECTORY, 1, threads=True) as engine:
        params = protocol.SamplingParams(max_tokens=5, stop_token_ids=text.end_tokens)
        tokens = protocol.pack_u32([5, 6])
        engine.send(protocol.Request("too early", tokens, params, grammar='start: "a"'))
        found = engine.collect(["too early"])["too early"]
        assert found.finish == "error" and "vocabulary is not known" in found.error
        vocabulary = text.vocabulary(engine.ready.vocab_size)
        engine.send(vocabulary, protocol.Request("wrong", tokens, params, grammar="start: ("))
        found = engine.collect(["wrong"])["wrong"]
        assert found.finish == "error" and "output cannot" in found.error
        engine.send(protocol.Request("last", tokens, params, grammar='start: "ab"'), protocol.Drain())
        assert text.tokenizer.decode(engine.collect(["last"])["last"].tokens) == "ab"
