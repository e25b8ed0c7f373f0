"""The grammars of whole answers: thoughts, calls in every format, schemas; what they take and what they do not."""

import json
from types import SimpleNamespace

import jsonschema
import pytest
from llguidance import LLMatcher
from phalanx.launcher.builtin_model import DIRECTORY
from phalanx.rank.scheduler.grammar import Compiled
from phalanx.rank.server.answer_grammar import Calls, Thoughts, answer_grammar
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.constraint import choice, json_schema, regex
from phalanx.rank.server.text import reasoning
from phalanx.rank.server.text.load import Text
from phalanx.rank.server.text.tool_formats import find, names

from ..scheduler.uniform import Uniform
from .text.parsing import parse

THINK, BRACKETS, GRANITE = map(reasoning.find, ("think", "mistral", "granite"))
VOCAB = 4040
CITY = {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False},
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
STRICT = [{"type": "function", "function": {**one, "strict": True}} for one in (WEATHER, CLOCK)]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WRONG = CALL.replace("city", "town")
SCHEMAS = {one["name"]: one["parameters"] for one in (WEATHER, CLOCK)}
FORMATS = [name for name in names() if find(name).grammar is not None]


@pytest.fixture(scope="module")
def text():
    return Text(str(DIRECTORY))


@pytest.fixture(scope="module")
def compiled(text):
    return Compiled(text.vocabulary(VOCAB))


@pytest.fixture(scope="module")
def takes(text, compiled):
    """Whether a grammar takes a text: "all", "beginning" or "no"."""

    def look(grammar, words):
        matcher = LLMatcher(compiled.tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        tokens = text.tokenizer.encode(words, False)
        if matcher.try_consume_tokens(tokens) < len(tokens):
            return "no"
        return "all" if matcher.is_accepting() else "beginning"

    return look


def of_format(text, name):
    return SimpleNamespace(tool_format=find(name), tokenizer=text.tokenizer, reasoning=None)


def test_nothing_is_asked(text):
    assert answer_grammar(text, None, None, Thoughts(THINK, True)) == ""
    assert answer_grammar(text, None, Calls(TOOLS, False, True), None) == "", "tools are neither strict nor required"


@pytest.mark.parametrize(
    "thoughts",
    [None, Thoughts(THINK, True), Thoughts(THINK, False), Thoughts(BRACKETS, False), Thoughts(GRANITE, False)],
)
def test_the_constraint_begins_after_the_thoughts(text, takes, thoughts):
    grammar = answer_grammar(text, choice("x", ["yes", "no"]), None, thoughts)
    begun = thoughts is not None and thoughts.begun
    assert takes(grammar, "yes") == ("beginning" if begun else "all")
    if thoughts is None:
        assert takes(grammar, "<think>") == "no"
        return
    opens, closes = thoughts.format.opens[-1], thoughts.format.closes[-1]
    head = "" if begun else opens
    assert takes(grammar, f"{head}\nWell, yes. <b> {{\n") == "beginning"
    assert takes(grammar, f"{head}\nWell, yes.\n{closes}\n\nno") == "all"
    assert takes(grammar, f"{head}\nWell.{closes}yes") == "all"
    assert takes(grammar, f"{head}Well.{closes}maybe") == "no"
    for one in thoughts.format.closes:
        assert takes(grammar, f"{head}a{one}b{closes}yes") == "no"


def test_required_and_named_calls(text, takes):
    several = answer_grammar(text, None, Calls(TOOLS, True, True), None)
    one = answer_grammar(text, None, Calls(TOOLS, True, False), Thoughts(THINK, True))
    assert takes(several, CALL) == takes(several, f"{CALL}\n{CALL}") == "all"
    assert takes(several, WRONG) == takes(several, "Hello") == "no"
    assert takes(one, f"I see</think>\n{CALL}") == "all" and takes(one, f"I see</think>\n{CALL}\n{CALL}") == "no"
    named = answer_grammar(text, None, Calls(TOOLS[1:], True, False), None)
    assert takes(named, CALL) == "no"
    assert takes(named, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>') == "all"


def test_strict_tools_that_may_be_called(text, takes):
    grammar = answer_grammar(text, None, Calls(STRICT, False, True), Thoughts(THINK, False))
    for words in ("", "Hello { <b> you", f"Let me look.\n{CALL}", CALL, f"<think>hm</think>\n\nWell: {CALL}\n{CALL}"):
        assert takes(grammar, words) == "all", words
    for words in (WRONG, f"Let me look.\n{WRONG}", f"{CALL} and so on"):
        assert takes(grammar, words) == "no", words


def test_a_schema_beside_tools(text, takes):
    grammar = answer_grammar(text, json_schema("x", {"type": "integer"}), Calls(TOOLS, False, True), None)
    assert takes(grammar, "12") == takes(grammar, CALL) == "all"
    assert takes(grammar, "Hello") == takes(grammar, WRONG) == "no"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("required", [True, False])
def test_each_format_reads_the_calls_that_it_is_held_to(text, compiled, name, required):
    form = of_format(text, name)
    grammar = answer_grammar(form, None, Calls(STRICT, required, True), None)
    closing = [i for i in range(text.tokenizer.size) if text.tokenizer.piece(i)[-1:] in (b'"', b"}", b"]", b">")]
    one = Uniform(VOCAB, seed=len(name), eager=[*closing, *text.end_tokens])
    for i in range(12):
        one.add(str(i), [1], compiled.grammar(grammar), 150, stop_token_ids=text.end_tokens)
    one.run()
    calls = 0
    for i in range(12):
        if one.ends[str(i)].finish != "stop":
            continue
        words = b"".join(map(text.tokenizer.piece, one.tokens.get(str(i), []))).decode(errors="replace")
        for kind, *rest in parse([words], tool_format=form.tool_format, tools=SCHEMAS)[0]:
            if kind != "call":
                assert kind == "text" and not required, words
                continue
            calls += 1
            jsonschema.validate(json.loads(rest[1]), SCHEMAS[rest[0]])
    assert calls or not required


def test_a_tool_that_is_not_strict_may_have_keywords_that_cannot_be_enforced(text, takes):
    loose = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}
    grammar = answer_grammar(text, None, Calls([{"function": loose}], True, False), None)
    assert takes(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1]}}\n</tool_call>') == "all"
    with pytest.raises(ApiError, match="tools: parameters of f cannot be enforced: .*uniqueItems is not supported"):
        answer_grammar(text, None, Calls([{"function": {**loose, "strict": True}}], False, False), None)


def test_a_format_without_a_grammar(text):
    form = SimpleNamespace(tool_format=find("hermes")._replace(grammar=None), tokenizer=text.tokenizer, reasoning=None)
    with pytest.raises(ApiError, match='cannot be enforced, use tool_choice "auto"') as error:
        answer_grammar(form, None, Calls(TOOLS, True, True), None)
    assert error.value.param == "tool_choice"
    with pytest.raises(ApiError, match="leave the tools or the output's format out"):
        answer_grammar(form, regex("x", "a"), Calls(TOOLS, False, True), None)
    assert answer_grammar(form, None, Calls(STRICT, False, True), None) == ""


def test_a_mistral_of_either_generation(text, takes):
    form = of_format(text, "mistral")
    old = answer_grammar(form, None, Calls(TOOLS, True, True), None)
    assert takes(old, '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}]') == "all"
    form.tokenizer = SimpleNamespace(added={"[ARGS]": 3, "[TOOL_CALLS]": 5})
    new = answer_grammar(form, None, Calls(TOOLS, True, False), None)
    assert takes(new, '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}') == "no", (
        "spelled, which the parser takes for text"
    )
    assert takes(new, "<tool_call>clock<think>{}") == "all", "the tokens 5 and 3"


@pytest.mark.parametrize("name", ["harmony", "granite33"])
def test_marks_around_the_answer_itself(text, name):
    form = SimpleNamespace(tool_format=None, tokenizer=text.tokenizer, reasoning=reasoning.find(name))
    with pytest.raises(ApiError, match="cannot be constrained yet") as error:
        answer_grammar(form, choice("guided_choice", ["yes"]), None, None)
    assert error.value.param == "guided_choice"


def test_a_spelled_marker_is_no_marker(text, compiled):
    """The parser takes it for text, so that a call would be none."""
    matcher = LLMatcher(compiled.tokenizer, answer_grammar(text, None, Calls(TOOLS, True, True), None))
    assert matcher.try_consume_tokens([text.tokenizer.encode("<", False)[0]]) == 0
