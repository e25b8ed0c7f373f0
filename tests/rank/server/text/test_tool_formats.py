"""Tool calls of every format: what is a call, what is text, in which order, wherever the text is cut."""

import pytest
from phalanx.rank.server.text import reasoning
from phalanx.rank.server.text.events import ToolCallArguments, ToolCallEnd, ToolCallStart
from phalanx.rank.server.text.output_parser import OutputParser
from phalanx.rank.server.text.tool_formats import choose, find, names

from .parsing import check
from .written import TEMPLATES

pytestmark = pytest.mark.timeout(60)
HERMES, LLAMA, MISTRAL = find("hermes"), find("llama3"), find("mistral")
THINK = reasoning.find("think")
ARGUMENTS = '{"a": "}{\\"</tool_call>", "b": [1, {"c": null}]}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'


def text(words):
    return ("text", words)


def thought(words):
    return ("reasoning", words)


def call(name, arguments):
    return ("call", name, arguments)


HERMES_CASES = [
    ("a call", CALL, [call("f", ARGUMENTS)]),
    (
        "text and calls",
        f"Well.\n\n{CALL}\nand\n\n{CALL}\n{CALL}\n\nDone",
        [text("Well."), call("f", ARGUMENTS), text("\n\nand"), *[call("f", ARGUMENTS)] * 2, text("\n\nDone")],
    ),
    ("arguments first", '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', [call("g", '{"x": 1}')]),
    ("no arguments", '<tool_call>{"name": "g"}</tool_call>', [call("g", "{}")]),
    ("null for arguments", '<tool_call>{"name": "g", "arguments": null}</tool_call>', [call("g", "{}")]),
    (
        "arguments in a string",
        '<tool_call>{"name": "g", "arguments": "{\\"x\\": \\"\\u00e9\\"}"}</tool_call>',
        [call("g", '{"x": "é"}')],
    ),
    (
        "other keys",
        '<tool_call>{"id": "1", "x": {"name": "h"}, "name": "g", "arguments": {}, "y": [2], "z": 3}</tool_call>',
        [call("g", "{}")],
    ),
    (
        "several in one pair of markers",
        '<tool_call>[{"name": "g", "arguments": {}}, {"name": "h", "arguments": {}}]</tool_call>.',
        [call("g", "{}"), call("h", "{}"), text(".")],
    ),
    ("no call at all", "a <tool_call>not json</tool_call> b", [text("a <tool_call>not json</tool_call> b")]),
    ("the marker alone", "\n<tool_call>", [text("\n<tool_call>")]),
    ("the marker twice", f"<tool_call>\n{CALL}", [text("<tool_call>"), call("f", ARGUMENTS)]),
    ("an object that is no call", '<tool_call>{"x": 1}</tool_call>', [text('<tool_call>{"x": 1}</tool_call>')]),
    ("no name", '<tool_call>{"name": {"x": 1}}</tool_call>', [text('<tool_call>{"name": {"x": 1}}</tool_call>')]),
    (
        "an object of Python's",
        "<tool_call>{'name': 'g', 'arguments': {}}</tool_call>",
        [text("<tool_call>{'name': 'g', 'arguments': {}}</tool_call>")],
    ),
    ("cut off", '<tool_call>{"name": "g", "arguments": {"x": [1', [call("g", '{"x": [1')]),
    ("cut off in a string", '<tool_call>{"name": "g", "arguments": "{\\"x', [call("g", '{"x')]),
    ("cut off early", 'a <tool_call>{"name": "g', [text('a <tool_call>{"name": "g')]),
    ("cut off in the marker", CALL[:-1], [call("f", ARGUMENTS)]),
    ("a brace too few", '<tool_call>{"name": "g", "arguments": {"x": 1}</tool_call>', [call("g", '{"x": 1}')]),
    (
        "two too few",
        '<tool_call>{"name": "g", "arguments": {"x": 1\n</tool_call>a',
        [call("g", '{"x": 1\n'), text("a")],
    ),
    ("a brace too many", '<tool_call>{"name": "g", "arguments": {}}}\n</tool_call>a', [call("g", "{}"), text("a")]),
    ("no closing marker", '<tool_call>{"name": "g", "arguments": {}}\n\na', [call("g", "{}"), text("a")]),
    (
        "no closing marker between calls",
        '<tool_call>{"name": "g", "arguments": {}}\n' + CALL,
        [call("g", "{}"), call("f", ARGUMENTS)],
    ),
    (
        "junk behind the arguments",
        '<tool_call>{"name": "g", "arguments": {"x": 1} oops}</tool_call>',
        [call("g", '{"x": 1}'), text("oops}</tool_call>")],
    ),
    (
        "the second is no call",
        '<tool_call>{"name": "g", "arguments": {}}; {"x": 1}</tool_call>',
        [call("g", "{}"), text('; {"x": 1}</tool_call>')],
    ),
    ("a marker in the arguments", '<tool_call>{"name": "g", "arguments": {1 < 2}}</tool_call>', [call("g", "{1 < 2}")]),
]
LLAMA_CASES = [
    ("a call", '{"name": "g", "parameters": {"x": "1"}}', [call("g", '{"x": "1"}')]),
    ("behind white space", ' \n{"name": "g", "parameters": {}}', [call("g", "{}")]),
    (
        "with its tag",
        '<|python_tag|>{"name": "g", "parameters": {}}; {"name": "h", "parameters": {}}',
        [call("g", "{}"), call("h", "{}")],
    ),
    ("a tag later", 'So:<|python_tag|>{"name": "g", "parameters": {}}', [text("So:"), call("g", "{}")]),
    ("other JSON", ' {"answer": 42} ok', [text(' {"answer": 42} ok')]),
    ("other JSON with a name", '{"name": "Ada", "born": 1815}', [text('{"name": "Ada", "born": 1815}')]),
    ("JSON in text", 'Use {"name": "g", "parameters": {}} so', [text('Use {"name": "g", "parameters": {}} so')]),
    ("text behind", '{"name": "g", "parameters": {}}\nDone. {', [call("g", "{}"), text("Done. {")]),
    ("code", "<|python_tag|>search(x={1})", [text("<|python_tag|>search(x={1})")]),
]
MISTRAL_CASES = [
    (
        "a list",
        '[TOOL_CALLS] [{"name": "g", "arguments": {"x": [1]}, "id": "abcdefghi"}, {"name": "h", "arguments": {}}]',
        [call("g", '{"x": [1]}'), call("h", "{}")],
    ),
    ("text behind a list", '[TOOL_CALLS][{"name": "g", "arguments": {}}]\nDone', [call("g", "{}"), text("Done")]),
    (
        "named",
        'Ok[TOOL_CALLS]g[ARGS]{"x": [1]}[TOOL_CALLS]h{}',
        [text("Ok"), call("g", '{"x": [1]}'), call("h", "{}")],
    ),
    ("with an id", '[TOOL_CALLS]g[CALL_ID]abc123XYZ[ARGS]{"x": "[TOOL_CALLS]"}', [call("g", '{"x": "[TOOL_CALLS]"}')]),
    ("text behind", '[TOOL_CALLS]g[ARGS]{"x": {}}\n\nThat was it.', [call("g", '{"x": {}}'), text("That was it.")]),
    ("cut off", '[TOOL_CALLS]g[ARGS]{"x": "}', [call("g", '{"x": "}')]),
    ("cut off early", "a[TOOL_CALLS]g[CALL", [text("a[TOOL_CALLS]g[CALL")]),
    ("no call", "[TOOL_CALLS]sorry", [text("[TOOL_CALLS]sorry")]),
    ("no call, later a brace", "[TOOL_CALLS] is, I think, {", [text("[TOOL_CALLS] is, I think, {")]),
    ("the marker twice", "[TOOL_CALLS][TOOL_CALLS]g{}", [text("[TOOL_CALLS]"), call("g", "{}")]),
    ("no list", "[TOOL_CALLS][1]", [text("[TOOL_CALLS][1]")]),
    ("a long name", f"[TOOL_CALLS]{'n' * 200}{{}}", [text(f"[TOOL_CALLS]{'n' * 200}{{}}")]),
]
IN_THOUGHTS = [
    ("unclosed", f"<think>So.\n{CALL}", [thought("So."), call("f", ARGUMENTS)]),
    ("two", f"<think>So.\n{CALL}\n{CALL}\n", [thought("So."), *[call("f", ARGUMENTS)] * 2]),
    ("cut off", '<think>So.<tool_call>{"name": "g", "arguments": {', [thought("So."), call("g", "{")]),
    ("closed", f"<think>So.</think>\n{CALL}", [thought("So."), call("f", ARGUMENTS)]),
    (
        "spoken of",
        '<think>I write <tool_call> and then {"name": "f", …}.</think>a',
        [thought('I write <tool_call> and then {"name": "f", …}.'), text("a")],
    ),
    ("begun", '<think>So <tool_call>\n{"name": …</think>a', [thought('So <tool_call>\n{"name": …'), text("a")]),
    (
        "begun in a string",
        '<think>So <tool_call>{"name": "</think>a',
        [thought('So <tool_call>{"name": "'), text("a")],
    ),
    (
        "drafted",
        f"<think>Like {CALL} so.\n</think>\n\n{CALL}",
        [thought(f"Like {CALL} so."), call("f", ARGUMENTS)],
    ),
    ("drafted, closed at once", f"<think>\n{CALL}\n</think>a", [thought(CALL), text("a")]),
    ("closed behind the call", f"<think>So.\n{CALL}\n</think>", [thought("So."), call("f", ARGUMENTS)]),
    ("closed behind two", f"<think>{CALL}\n{CALL}</think> \n\n", [call("f", ARGUMENTS)] * 2),
    (
        "closed behind an open call",
        '<think>So.<tool_call>{"name": "g", "arguments": {}}\n</think>\n',
        [thought("So."), call("g", "{}")],
    ),
    (
        "closed behind a call, then called",
        f"<think>\n{CALL}\n</think>\n\n{CALL}",
        [thought(CALL), call("f", ARGUMENTS)],
    ),
    (
        "closed behind a call, then thought",
        f"<think>\n{CALL}\n</think>\n<think>b\n{CALL}</think>",
        [thought(f"{CALL}\nb"), call("f", ARGUMENTS)],
    ),
    ("closed behind what may be a call", f"<think>{CALL}\n<tool</think>\n", [thought(f"{CALL}\n<tool")]),
    (
        "drafted, then called",
        f"<think>Like {CALL}, that is\n{CALL}",
        [thought(f"Like {CALL}, that is"), call("f", ARGUMENTS)],
    ),
    ("again", f"<think>a</think>b\n<think>c\n{CALL}", [thought("a"), text("b"), thought("c"), call("f", ARGUMENTS)]),
]


def cases(listed):
    return pytest.mark.parametrize("case", listed, ids=[case[0] for case in listed])


@cases(HERMES_CASES)
def test_hermes(case):
    check(*case[1:], tool_format=HERMES)
    check(*case[1:], tool_format=HERMES, reasoning=THINK)


@cases(LLAMA_CASES)
def test_llama3(case):
    check(*case[1:], tool_format=LLAMA)


@cases(MISTRAL_CASES)
def test_mistral(case):
    check(*case[1:], tool_format=MISTRAL)


@cases(IN_THOUGHTS)
def test_calls_in_thoughts(case):
    check(*case[1:], tool_format=HERMES, reasoning=THINK)


def test_calls_in_thoughts_that_the_prompt_opened():
    options = {"reasoning": THINK, "thinking": True}
    hermes = {"tool_format": HERMES, **options}
    check(f"So.\n{CALL}\n</think>", [thought("So."), call("f", ARGUMENTS)], **hermes)
    check(f"So.\n{CALL}\n</think>\n\n", [thought("So."), call("f", ARGUMENTS)], **hermes, stops=["\n"])
    check(f"{CALL}{CALL}</think>\n", [call("f", ARGUMENTS)], **hermes, parallel_calls=False)
    check(f"{CALL}</think>\n", [thought(CALL)], "</think>", **hermes, stops=["</think>"])
    check("So.[TOOL_CALLS]g{}</think>\n", [thought("So."), call("g", "{}")], tool_format=MISTRAL, **options)
    check("So.[TOOL_CALLS]g{}</think>a", [thought("So.[TOOL_CALLS]g{}"), text("a")], tool_format=MISTRAL, **options)


def test_one_call_only():
    options = {"tool_format": HERMES, "parallel_calls": False}
    check(f"a\n{CALL}\n{CALL}\nb", [text("a"), call("f", ARGUMENTS)], **options)
    check(f"<think>{CALL}\n{CALL}", [call("f", ARGUMENTS)], **options, reasoning=THINK)
    two = '[{"name": "g", "arguments": {}}, {"name": "h", "arguments": {}}]'
    check("[TOOL_CALLS]" + two, [call("g", "{}")], tool_format=MISTRAL, parallel_calls=False)
    parser, events = OutputParser(**options), []
    parser.feed(CALL.removesuffix("\n</tool_call>"), events)
    assert parser.stopped and isinstance(events[-1], ToolCallEnd)  # nothing is generated after it


def test_call_fragments_come_early():
    """The name is out before the arguments are complete, and the arguments as they are written."""
    parser, events = OutputParser(tool_format=HERMES), []
    parser.feed('<tool_call>{"name": "f", "arguments": {"city": "Par', events)
    start, arguments = events
    assert start == ToolCallStart(0, start.id, "f") and start.id.startswith("call_")
    assert arguments == ToolCallArguments(0, '{"city": "Par')


def test_ids_that_mistral_s_templates_take():
    for output, expected in (("g[CALL_ID]abc123XYZ[ARGS]{}", "abc123XYZ"), ("g[CALL_ID]0[ARGS]{}", ""), ("g{}", "")):
        parser, events = OutputParser(tool_format=MISTRAL), []
        parser.feed("[TOOL_CALLS]" + output, events)
        assert len(events[0].id) == 9 and events[0].id.isalnum() and expected in ("", events[0].id)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_chosen_by_the_template(name):
    """No other format takes the template for its own."""
    assert [one for one in names() if find(one).matches(TEMPLATES[name])] == [name]
    assert choose(TEMPLATES[name]) is find(name)


def test_every_format_but_the_general_one_is_chosen_by_some_template():
    assert sorted(TEMPLATES) == sorted({*names()} - {"json"})


def test_model_types_say_what_a_template_does_not():
    assert choose("nothing") is None
    assert choose("tools") is None
    assert choose("nothing", "glm4_moe") is None
    assert choose("tools", "glm4_moe") is find("glm45") and choose("tools [TOOL_CALLS]", "glm4_moe") is MISTRAL
    types = [one for name in names() for one in find(name).models]
    assert len(types) == len({*types})
