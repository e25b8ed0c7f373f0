"""Formats that name the function in a head of their own; and those of Python and Gemma."""

import pytest
from phalanx.rank.server.text import reasoning
from phalanx.rank.server.text.output_parser import OutputParser
from phalanx.rank.server.text.tool_formats import find

from .parsing import check, parse
from .written import DEEPSEEK, KIMI

pytestmark = pytest.mark.timeout(60)
BEGIN, CALL, SEPARATOR, CALL_END, END = DEEPSEEK


def text(words):
    return ("text", words)


def call(name, arguments):
    return ("call", name, arguments)


def deepseek(name, arguments):
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


CASES = [
    ("deepseek_v3", f'a{BEGIN}{deepseek("f", "{}")}\n{deepseek("g", """{"x": "```"}""")}{END}b',
     [text("a"), call("f", "{}"), call("g", '{"x": "```"}'), text("b")]),
    ("deepseek_v3", deepseek("f", '{"x": 1}'), [call("f", '{"x": 1}')]),  # without the marker of all
    ("deepseek_v3", f"{BEGIN}{deepseek('f', '{')}{END}b", [call("f", "{\n"), text("b")]),  # a bracket is missing
    ("deepseek_v3", f"{BEGIN}{CALL}what?", [text(f"{BEGIN}{CALL}what?")]),
    ("deepseek_v31", f"{BEGIN}{CALL}f{SEPARATOR}{{}}{CALL_END}{CALL}g{SEPARATOR}{{}}{CALL_END}{END}",
     [call("f", "{}"), call("g", "{}")]),
    ("kimi_k2", f"{KIMI[0]}{KIMI[1]}functions.f:0{KIMI[2]}{{}}{KIMI[3]}{KIMI[1]}g:1{KIMI[2]}{{}}{KIMI[3]}{KIMI[4]}.",
     [call("f", "{}"), call("g", "{}"), text(".")]),
    ("llama_functions", '<function=f>{"x": "</function>"}</function> <function=g>{}',
     [call("f", '{"x": "</function>"}'), call("g", "{}")]),
    ("llama_functions", "a <function=f> and {", [text("a <function=f> and {")]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
     [call("f", "{}"), call("g", "{}")]),
    ("phi4", 'functools[{"name": "f", "arguments": {}}]', [call("f", "{}")]),
    ("phi4", "Use functools.cache or functools[0].", [text("Use functools.cache or functools[0].")]),
    ("jamba", '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>', [call("f", "{}")]),
    ("gemma",
     '<start_function_call>call:f{a:<escape>{,}"<escape>,b:[1,<escape><escape>],c:{d:true},e:so}<end_function_call>.',
     [call("f", '{"a": "{,}\\"", "b": [1, ""], "c": {"d": true}, "e": "so"}'), text(".")]),
    ("gemma", '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>', [call("f", '{"a": "x"}')]),
    ("gemma", "<start_function_call>call:f{a:5<end_function_call>.", [call("f", '{"a": 5}'), text(".")]),
    ("gemma", "<start_function_call>f(5)", [text("<start_function_call>f(5)")]),
    ("pythonic", "[f(a='(\\'', b=[1, {'c': None}], d=-1.5), g()]",
     [call("f", '{"a": "(\'", "b": [1, {"c": null}], "d": -1.5}'), call("g", "{}")]),
    ("pythonic", "<|python_start|>[f(a=\"x\")]<|python_end|>b", [call("f", '{"a": "x"}'), text("b")]),
    ("pythonic", "<function_calls>\nf(a=1)\ng(b=2)\n</function_calls>", [call("f", '{"a": 1}'), call("g", '{"b": 2}')]),
    ("lfm2", "a<|tool_call_start|>[f(a=\"x\"), g()]<|tool_call_end|>b",
     [text("a"), call("f", '{"a": "x"}'), call("g", "{}"), text("b")]),
    ("lfm2", "[f(a=1)]", [text("[f(a=1)]")]),
    ("pythonic", "[f(a=true, b=so)]", [call("f", '{"a": true, "b": "so"}')]),
    ("pythonic", "[f(a=1", [call("f", '{"a": 1')]),
    ("pythonic", "[1, 2] and [f(x)]", [text("[1, 2] and [f(x)]")]),
    ("pythonic", "[f](https://example.org)", [text("[f](https://example.org)")]),
    ("json", '{"name": "f", "arguments": {"x": 1}}', [call("f", '{"x": 1}')]),
    ("json", '[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]', [call("f", "{}")] * 2),
    ("json", 'So:\n```json\n{"name": "f", "arguments": {}}\n```', [text("So:"), call("f", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_calls(case):
    name, words, expected = case
    check(words, expected, tool_format=find(name))


def test_only_offered_tools_are_called_without_a_marker():
    other = '{"name": "Ada", "arguments": {"born": 1815}}'
    check(other, [text(other)], tool_format=find("json"), tools={"f": {}})
    check("[g(x=1)]", [text("[g(x=1)]")], tool_format=find("pythonic"), tools={"f": {}})
    check("[f(x=1)]", [call("f", '{"x": 1}')], tool_format=find("pythonic"), tools={"f": {}})


def test_positions_have_the_schema_s_names():
    tools = {"f": {"properties": {"a": {}, "b": {}}}}
    check("[f(a=1, 2, 3)]", [call("f", '{"a": 1, "b": 2, "2": 3}')], tool_format=find("pythonic"), tools=tools)


def test_kimi_s_own_ids_stay():
    parser, events = OutputParser(tool_format=find("kimi_k2")), []
    parser.feed(f"{KIMI[0]}{KIMI[1]}functions.get:12{KIMI[2]}{{}}", events)
    assert (events[0].id, events[0].name) == ("functions.get:12", "get")


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
START, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
HARMONY = [
    ("an answer", f"{THOUGHT}{START}{FINAL}Yes.\n<|return|>", [("reasoning", "Hm."), text("Yes.")]),
    ("a call", f'{THOUGHT}{START}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>',
     [("reasoning", "Hm."), call("f", '{"a": 1}')]),
    ("the function first", f'{THOUGHT}{START} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}',
     [("reasoning", "Hm."), call("f", '{"a": 1}')]),
    ("at once", " to=functions.f<|channel|>analysis code<|message|>{}", [call("f", "{}")]),
    ("told before", f"<|channel|>commentary<|message|>I look.<|end|>{START}<|channel|>commentary to=f<|message|>{{}}",
     [text("I look."), call("f", "{}")]),
    ("thinks twice", f"{THOUGHT}{START}{THOUGHT}{START}{FINAL}Yes", [("reasoning", "Hm.Hm."), text("Yes")]),
    ("no end of the thoughts", f"{THOUGHT[:-7]}{START}{FINAL}Yes", [("reasoning", "Hm."), text("Yes")]),
    ("words", "It goes to=functions.f then", [text("It goes to=functions.f then")]),
]  # fmt: skip


@pytest.mark.parametrize("case", HARMONY, ids=[case[0] for case in HARMONY])
def test_harmony(case):
    check(*case[1:], tool_format=find("harmony"), reasoning=reasoning.find("harmony"))


def test_granite_thinks_in_words():
    options = {"reasoning": reasoning.find("granite")}
    answer = "Here is my thought process:\n\nHm.\n\nHere's my response:\nYes"
    check(answer, [("reasoning", "Hm."), text("Yes")], **options)
    check(f"So. {answer}", [text(f"So. {answer}")], **options)


def test_granite_marks_its_answer_too():
    options = {"reasoning": reasoning.find("granite33")}
    check("<think>Hm.</think><response>Yes.</response>", [("reasoning", "Hm."), text("Yes.")], **options)


def test_every_spelling_is_a_format():
    from phalanx.rank import options
    from phalanx.rank.server.text import tool_formats

    assert tuple(tool_formats.names()) == options.TOOL_FORMATS and tuple(reasoning.names()) == options.REASONING
    assert {*options.TOOL_SPELLINGS.values()} <= {*tool_formats.names()}
    assert {*options.REASONING_SPELLINGS.values()} <= {*reasoning.names()}


def test_heads_that_never_end_are_given_up():
    for name, begun in (("kimi_k2", f"{KIMI[0]}{KIMI[1]}"), ("qwen3_coder", "<tool_call>\n<function=")):
        words = begun + "f" * 1000
        found, _ = parse(list(words), tool_format=find(name))
        assert found == [text(words)]


TOOLS = {"f": {"properties": {"x": {"type": "integer"}}}, "g": {}}
UNMARKED = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize("name", ["hermes", "granite", "jamba", "phi4"])
@pytest.mark.parametrize(
    "words",
    [
        UNMARKED,
        f"\n\n{UNMARKED}\n",
        f"```json\n{UNMARKED}\n```",
        f"```\n{UNMARKED}\n```\n",
        '{\n  "name": "f",\n  "arguments": {"x": 1}\n}',
        '{"name": "f", "parameters": {"x": 1}}',
    ],
)
def test_a_whole_answer_that_is_a_call_without_its_markers(name, words):
    check(words, [call("f", '{"x": 1}')], tool_format=find(name), tools=TOOLS)


@pytest.mark.parametrize(
    "words",
    [
        f"{UNMARKED} is the call.",
        f"Call {UNMARKED}",
        f"```json\n{UNMARKED}\n```\nThis asks for x.",
        UNMARKED.replace('"f"', '"Ada"'),
        UNMARKED.replace("name", "title"),
        f"{UNMARKED}\n{UNMARKED}",
        f"[{UNMARKED}]",
        UNMARKED[:-1],
        UNMARKED[:20],
        '{"name": "f"}',
        '{"name": "f", "arguments": {"x": }}',
        "```python\nprint(1)\n```",
        "```json\n{}\n```",
        "{",
    ],
)
def test_an_answer_in_json_stays_a_text(words):
    check(words, [text(words)], tool_format=find("hermes"), tools=TOOLS)


def test_an_unmarked_call_behind_thoughts_and_before_a_marked_one():
    thinks = {"tool_format": find("hermes"), "tools": TOOLS, "reasoning": reasoning.find("think")}
    check(f"<think>Hm.</think>\n{UNMARKED}", [("reasoning", "Hm."), call("f", '{"x": 1}')], **thinks)
    check(f"<think>{UNMARKED}</think>\nNo.", [("reasoning", UNMARKED), text("No.")], **thinks)
    marked = f"{UNMARKED}<tool_call>{UNMARKED}</tool_call>"
    check(marked, [text(UNMARKED), call("f", '{"x": 1}')], **thinks)
    assert parse([UNMARKED], tool_format=find("hermes"))[0] == [text(UNMARKED)], "no tools are offered"


def test_an_answer_in_json_is_held_back_no_longer_than_it_may_be_a_call():
    parser, events = OutputParser(tool_format=find("hermes"), tools=TOOLS), []
    parser.feed('{"na', events)
    assert not events
    parser.feed('me": "Ada", "born"', events)
    assert events[-1].text == '{"name": "Ada", "born"'
