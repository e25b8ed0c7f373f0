"""The outcome of the text machine does not depend on where the text is cut."""

import json
import random

import pytest
from phalanx.rank.front.text.machine import Machine, Output, Reasoning, partial_suffix
from phalanx.rank.front.text.tools import choose, hermes, llama3, mistral

pytestmark = pytest.mark.timeout(30)
THINK = Reasoning("<think>", "</think>")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}{\\"", "b": [1, {"c": null}]}}\n</tool_call>'


def run(pieces, **options):
    """The whole output for text in these pieces: content, reasoning, calls, stop string."""
    machine, out = Machine(**options), Output()
    for piece in pieces:
        machine.feed(piece, out)
        if machine.stopped:
            break
    machine.finish(out)
    calls = []
    for delta in out.calls:
        if "id" in delta:
            assert delta["index"] == len(calls) and delta["function"]["arguments"] == ""
            calls.append([delta["function"]["name"], ""])
        else:
            calls[delta["index"]][1] += delta["function"]["arguments"]
    return out.content, out.reasoning, calls, machine.stop_string


def cut(text, rng):
    at = sorted(rng.sample(range(1, len(text)), rng.randint(0, min(12, len(text) - 1)))) if len(text) > 1 else []
    return [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]


CASES = [
    ("plain", "hello <think> world", {}, ("hello <think> world", "", [], None)),
    ("stop", "one two STOP three", {"stops": ["STOP"]}, ("one two ", "", [], "STOP")),
    ("stop kept", "one STOP two", {"stops": ["STOP"], "keep_stop": True}, ("one STOP", "", [], "STOP")),
    ("first complete wins", "xabcd", {"stops": ["abcd", "bc"]}, ("xa", "", [], "bc")),
    ("longer of two at one end", "xabc", {"stops": ["c", "abc"]}, ("x", "", [], "abc")),
    ("near misses", "aab aaab aabb", {"stops": ["aabb"]}, ("aab aaab ", "", [], "aabb")),
    ("unfinished stop is text", "text ST", {"stops": ["STOP"]}, ("text ST", "", [], None)),
    ("reasoning", "<think>\nhm\n\nhm\n</think>\n\nyes\n", {"reasoning": THINK}, ("yes\n", "hm\n\nhm", [], None)),
    ("opened by the prompt", "\nhm\n</think>\nyes", {"reasoning": THINK, "thinking": True}, ("yes", "hm", [], None)),
    ("never closed", "<think>hm", {"reasoning": THINK}, ("", "hm", [], None)),
    ("think later is text", "so <think>hm</think>", {"reasoning": THINK}, ("so <think>hm</think>", "", [], None)),
    ("stop in reasoning", "<think>a STOP b</think>", {"reasoning": THINK, "stops": ["STOP"]}, ("", "a ", [], "STOP")),
    ("leading space without marker", "  <thin", {"reasoning": THINK}, ("  <thin", "", [], None)),
    ("call", CALL, {"syntax": hermes.SYNTAX}, ("", "", [["f", '{"a": "}{\\"", "b": [1, {"c": null}]}']], None)),
    (
        "text and calls",
        "Well.\n\n" + CALL + "\n" + CALL + "\n\nDone",
        {"syntax": hermes.SYNTAX},
        ("Well.Done", "", [["f", '{"a": "}{\\"", "b": [1, {"c": null}]}']] * 2, None),
    ),
    (
        "one call only",
        CALL + "\n" + CALL,
        {"syntax": hermes.SYNTAX, "parallel_calls": False},
        ("", "", [["f", '{"a": "}{\\"", "b": [1, {"c": null}]}']], None),
    ),
    (
        "reasoning, then a call",
        "<think>hm</think>\n" + CALL,
        {"reasoning": THINK, "syntax": hermes.SYNTAX},
        ("", "hm", [["f", '{"a": "}{\\"", "b": [1, {"c": null}]}']], None),
    ),
    (
        "arguments first",
        '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>',
        {"syntax": hermes.SYNTAX},
        ("", "", [["g", '{"x": 1}']], None),
    ),
    ("no arguments", '<tool_call>{"name": "g"}</tool_call>', {"syntax": hermes.SYNTAX}, ("", "", [["g", "{}"]], None)),
    (
        "arguments in a string",
        '<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}</tool_call>',
        {"syntax": hermes.SYNTAX},
        ("", "", [["g", '{"x": 1}']], None),
    ),
    (
        "no call at all",
        "<tool_call>not json</tool_call>",
        {"syntax": hermes.SYNTAX},
        ("<tool_call>not json</tool_call>", "", [], None),
    ),
    (
        "a call cut off",
        '<tool_call>{"name": "g", "arguments": {"x": [1',
        {"syntax": hermes.SYNTAX},
        ("", "", [["g", '{"x": [1']], None),
    ),
    (
        "llama",
        '{"name": "g", "parameters": {"x": "1"}}',
        {"syntax": llama3.SYNTAX},
        ("", "", [["g", '{"x": "1"}']], None),
    ),
    (
        "llama with its tag",
        '<|python_tag|>{"name": "g", "parameters": {}}; {"name": "h", "parameters": {}}',
        {"syntax": llama3.SYNTAX},
        ("", "", [["g", "{}"], ["h", "{}"]], None),
    ),
    ("llama, other json", '{"answer": 42} ok', {"syntax": llama3.SYNTAX}, ('{"answer": 42} ok', "", [], None)),
    ("llama, text", 'Use {"name": "g"} so', {"syntax": llama3.SYNTAX}, ('Use {"name": "g"} so', "", [], None)),
    (
        "mistral list",
        '[TOOL_CALLS][{"name": "g", "arguments": {"x": [1]}}, {"name": "h", "arguments": {}}]',
        {"syntax": mistral.SYNTAX},
        ("", "", [["g", '{"x": [1]}'], ["h", "{}"]], None),
    ),
    (
        "mistral named",
        'Ok[TOOL_CALLS]g[ARGS]{"x": [1]}[TOOL_CALLS]h{}',
        {"syntax": mistral.SYNTAX},
        ("Ok", "", [["g", '{"x": [1]}'], ["h", "{}"]], None),
    ),
    ("mistral, no call", "[TOOL_CALLS]sorry", {"syntax": mistral.SYNTAX}, ("[TOOL_CALLS]sorry", "", [], None)),
]


@pytest.mark.parametrize("name, text, options, expected", CASES, ids=[case[0] for case in CASES])
def test_any_cut_gives_the_same(name, text, options, expected):
    assert run([text], **options) == expected
    assert run(list(text), **options) == expected
    rng = random.Random(name)
    for _ in range(200):
        pieces = cut(text, rng)
        assert run(pieces, **options) == expected, pieces


def test_random_stops():
    """Against the definition: the shortest beginning of the text that ends with a stop string."""
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices("ab", k=20))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(3)]
        ends = [
            (end, stop)
            for end in range(21)
            for stop in sorted(stops, key=len, reverse=True)
            if text[:end].endswith(stop)
        ]
        content, _, _, stop = run(cut(text, rng), stops=stops)
        assert (content, stop) == ((text[: ends[0][0] - len(ends[0][1])], ends[0][1]) if ends else (text, None))


def test_only_the_longest_partial_match_is_held_back():
    machine, out = Machine(stops=["\n\nUser:"]), Output()
    machine.feed("Hello\n", out)
    assert out.content == "Hello"
    machine.feed("x", out)
    assert out.content == "Hello\nx"
    machine.feed("\n\n\nUse", out)
    assert out.content == "Hello\nx\n"
    assert partial_suffix("aaab", ["aab", "abb"]) == 2


def test_call_fragments_come_early():
    """The name is out before the arguments are complete, and the arguments as they are written."""
    machine, out = Machine(syntax=hermes.SYNTAX), Output()
    machine.feed('<tool_call>{"name": "f", "arguments": {"city": "Par', out)
    assert [delta["function"] for delta in out.calls] == [
        {"name": "f", "arguments": ""},
        {"arguments": '{"city": "Par'},
    ]
    assert json.dumps(out.calls[0]["id"]).startswith('"call_')


def test_syntax_is_chosen_by_the_template():
    assert choose("... <tool_call> ...") is hermes.SYNTAX
    assert choose("<tool_call><function=f>") is None
    assert choose("[TOOL_CALLS]") is mistral.SYNTAX
    assert choose("<|python_tag|>") is llama3.SYNTAX
    assert choose("nothing") is None
