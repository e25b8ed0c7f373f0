"""Content, reasoning and stop strings; tests of tool calls are beside this in test_tool_formats.py."""

import random

import pytest
from phalanx.rank.server.text import reasoning
from phalanx.rank.server.text.events import Text
from phalanx.rank.server.text.output_parser import OutputParser
from phalanx.rank.server.text.stop_strings import partial_suffix
from phalanx.rank.server.text.tool_formats import find

from .parsing import check, cut, parse

pytestmark = pytest.mark.timeout(60)
THINK = reasoning.find("think")
HERMES = find("hermes")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def text(words):
    return ("text", words)


def thought(words):
    return ("reasoning", words)


CASES = [
    ("plain", "hello <think> world\n", {}, [text("hello <think> world\n")]),
    ("stop", "one two STOP three", {"stops": ["STOP"]}, [text("one two ")], "STOP"),
    ("stop kept", "one STOP two", {"stops": ["STOP"], "keep_stop": True}, [text("one STOP")], "STOP"),
    ("first complete wins", "xabcd", {"stops": ["abcd", "bc"]}, [text("xa")], "bc"),
    ("longer of two at one end", "xabc", {"stops": ["c", "abc"]}, [text("x")], "abc"),
    ("near misses", "aab aaab aabb", {"stops": ["aabb"]}, [text("aab aaab ")], "aabb"),
    ("unfinished stop is text", "text ST", {"stops": ["STOP"]}, [text("text ST")]),
    ("reasoning", "<think>\nhm\n\nhm\n</think>\n\nyes\n", {"reasoning": THINK}, [thought("hm\n\nhm"), text("yes\n")]),
    (
        "opened by the prompt",
        "\nhm\n</think>\nyes",
        {"reasoning": THINK, "thinking": True},
        [thought("hm"), text("yes")],
    ),
    (
        "opened by the prompt and by the model",
        "\n<think>\nhm <think>\n</think>\nyes",
        {"reasoning": THINK, "thinking": True},
        [thought("hm <think>"), text("yes")],
    ),
    ("never closed", "<think>hm", {"reasoning": THINK}, [thought("hm")]),
    ("no thoughts", "\n <thin", {"reasoning": THINK}, [text("\n <thin")]),
    ("white space only", " \n", {"reasoning": THINK}, [text(" \n")]),
    ("empty thoughts", " \n<think>\n\n</think>\n\nyes", {"reasoning": THINK}, [text("yes")]),
    (
        "thinks again",
        "<think>a</think>b<think>c</think>d",
        {"reasoning": THINK},
        [thought("a"), text("b"), thought("c"), text("d")],
    ),
    (
        "thinks again in blocks",
        "<think>\na\n</think>\n\nb\n\n<think>\nc\n</think>\n\nd",
        {"reasoning": THINK},
        [thought("a"), text("b"), thought("\nc"), text("\n\nd")],
    ),
    ("speaks of the marker", "The `<think>` tag", {"reasoning": THINK}, [text("The `<think>` tag")]),
    ("thinks late", "so <think>hm</think>", {"reasoning": THINK}, [text("so "), thought("hm")]),
    # Stop strings belong to the content.
    (
        "stop in reasoning",
        "<think>a STOP b</think>c STOP d",
        {"reasoning": THINK, "stops": ["STOP"]},
        [thought("a STOP b"), text("c ")],
        "STOP",
    ),
    (
        "stop at the line's end",
        "a\nb\n</think>\n\nyes\nno",
        {"reasoning": THINK, "thinking": True, "stops": ["\n"]},
        [thought("a\nb"), text("yes")],
        "\n",
    ),
    (
        "stop over a marker is none",
        "ST<think>OP</think>OP ST",
        {"reasoning": THINK, "stops": ["STOP"]},
        [text("ST"), thought("OP"), text("OP ST")],
    ),
    (
        "the marker as stop",
        "<think>a\n</think>b",
        {"reasoning": THINK, "stops": ["</think>"]},
        [thought("a")],
        "</think>",
    ),
    (
        "the marker as stop, kept",
        "<think>a</think>b",
        {"reasoning": THINK, "stops": ["</think>"], "keep_stop": True},
        [thought("a</think>")],
        "</think>",
    ),
    ("the opening marker as stop", "a<think>b", {"reasoning": THINK, "stops": ["<think>"]}, [text("a")], "<think>"),
    ("newlines before a stop", "a\n\nSTOP", {"reasoning": THINK, "stops": ["STOP"]}, [text("a\n\n")], "STOP"),
    (
        "stop at the line's end between calls",
        f"<think>x</think>\n\n{CALL}\n{CALL}\nyes\nno",
        {"reasoning": THINK, "tool_format": HERMES, "stops": ["\n"]},
        [thought("x"), ("call", "f", '{"a": 1}'), ("call", "f", '{"a": 1}'), text("yes")],
        "\n",
    ),
    (
        "stop in a call",
        f"a: {CALL}1",
        {"tool_format": HERMES, "stops": ["1"]},
        [text("a: "), ("call", "f", '{"a": 1}')],
        "1",
    ),
    ("a call as stop", f"a {CALL}", {"tool_format": HERMES, "stops": ["<tool_call>"]}, [text("a ")], "<tool_call>"),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_any_cut_gives_the_same(case):
    _, words, options, expected, *stop = case
    check(words, expected, *stop, **options)


def test_random_stops():
    """Against the definition: the shortest beginning of the text that ends with a stop string."""
    rng = random.Random(0)
    for _ in range(500):
        words = "".join(rng.choices("ab", k=20))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(3)]
        ends = [
            (end, stop)
            for end in range(21)
            for stop in sorted(stops, key=len, reverse=True)
            if words[:end].endswith(stop)
        ]
        expected = words[: ends[0][0] - len(ends[0][1])] if ends else words
        found = ([text(expected)] if expected else [], ends[0][1] if ends else None)
        assert parse(cut(words, rng), stops=stops) == found


def test_only_the_longest_partial_match_is_held_back():
    for options in ({}, {"tool_format": HERMES}):
        parser, events = OutputParser(stops=["\n\nUser:"], **options), []
        for piece, shown in (("Hello\n", "Hello"), ("x", "Hello\nx"), ("\n\n\nUse", None), ("r", None), ("s", None)):
            parser.feed(piece, events)
            assert shown is None or events == [Text(shown)]
        assert events == [Text("Hello\nx\n\n\nUsers")] and not parser.stopped
    assert partial_suffix("aaab", ["aab", "abb"]) == 2


def test_text_with_a_marker_s_first_letter_is_held_back_no_longer_than_needed():
    parser, events = OutputParser(reasoning=THINK, tool_format=HERMES), []
    for piece, shown in (("a <", "a "), ("t", "a "), ("d>", "a <td>"), (" < ", "a <td> < ")):
        parser.feed(piece, events)
        assert events == [Text(shown)]
