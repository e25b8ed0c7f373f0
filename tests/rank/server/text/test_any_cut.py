"""Every tool-call and reasoning format: where a text is cut into tokens changes nothing."""

import json
import random

import pytest
from phalanx.rank.server.text import reasoning, tool_formats

from .parsing import cut, parse
from .written import PARTS, WRITE

pytestmark = pytest.mark.timeout(120)
TEXTS, FEW = 200, 20  # for each format; few in the short suite
COUNTS = [FEW, pytest.param(TEXTS, marks=pytest.mark.long)]
THINK = reasoning.find("think")
TOOLS = {"f": {"properties": {"k": {"type": "string"}, "a": {"type": "integer"}}}}
OPTIONS = [{}, {"reasoning": THINK}, {"parallel_calls": False}, {"stops": ["STOP", "\n"]}, {"tools": TOOLS}]
COMMON = ["a", "\n", " ", "\\", "<think>", "</think>", "STOP"]


def check_every_cut(text, **options):
    """The events of a text, which do not depend on where it is cut."""
    whole = parse([text], **options)
    assert parse(list(text), **options) == whole, text
    for at in range(1, len(text)):
        assert parse([text[:at], text[at:]], **options) == whole, (text[:at], text[at:])
    return whole[0]


def test_there_are_texts_for_every_format():
    assert sorted(PARTS) == sorted(WRITE) == tool_formats.names()


def texts(name, count):
    """Random pieces; and calls in which something is missing, or too much."""
    rng = random.Random(name)
    parts = [*PARTS[name] * 2, *COMMON]
    for i in range(count):
        if i % 2:
            yield "".join(rng.choices(parts, k=rng.randint(1, 7)))
            continue
        text = "".join(
            WRITE[name]("f", {"k": rng.choice(["a", "{", '"', "\n"]), "a": 1}) for _ in range(rng.randint(1, 2))
        )
        at, missing = rng.randrange(len(text)), rng.choice([0, 0, 1, 5, 100])
        yield text[:at] + "".join(rng.choices(parts, k=rng.randint(0, 2))) + text[at + missing :]


@pytest.mark.sample(4)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", PARTS)
def test_tool_calls(name, count):
    """All of the text is content where nothing is a call."""
    own = {"reasoning": reasoning.find("harmony")} if name == "harmony" else {}
    called = 0
    for i, text in enumerate(texts(name, count)):
        more = {**OPTIONS[i // 2 % len(OPTIONS)], **own}
        found = check_every_cut(text, tool_format=tool_formats.find(name), **more)
        calls = [event for event in found if event[0] == "call"]
        called += bool(calls)
        if not calls and not more:
            assert "".join(event[1] for event in found) == text
    assert called > count / 10


@pytest.mark.parametrize("name", reasoning.names())
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_reasoning(name, thinking, count):
    rng = random.Random(name)
    form = reasoning.find(name)
    parts = [*form.markers, form.opens[0][:3], form.closes[0][:-1], "a", "\n", " ", "`", "STOP", "ST"]
    for i in range(count):
        text = "".join(rng.choices(parts, k=rng.randint(1, 8)))
        stops = ((), ("STOP",), ("\n",), form.closes)[i % 4]
        found = check_every_cut(text, reasoning=form, thinking=thinking, stops=stops)
        content = "".join(event[1] for event in found if event[0] == "text")
        assert not any(stop in content for stop in stops), text
        if not form.first:
            assert form.opens[0] not in content.replace("`" + form.opens[0], ""), text


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PARTS)
def test_calls_with_all_that_arguments_can_hold(name):
    """They are found as they were written, between texts."""
    rng = random.Random(3)
    words = [
        *"\"\\}{',[](",
        "\n x",
        "<tool_call>",
        "<think>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "</think>",
        "é🙂",
        "True",
    ]
    tools = {f"f{i}": {"properties": {"k": {"type": "string"}}} for i in range(4)}
    for _ in range(40):
        expected, output = [], ""
        for i in range(rng.randint(1, 3)):
            values = [["".join(rng.choices(words, k=3)), i, None, {"x": {}}], -1.5, True, {"y": "z"}]
            arguments = {"k": "".join(rng.choices(words, k=3)), "v": rng.choice(values)}
            expected += [(f"f{i}", arguments), f"t{i}"]
            output += WRITE[name](f"f{i}", arguments) + f"t{i}"
        for pieces in ([output], list(output), cut(output, rng)):
            found = parse(pieces, tool_format=tool_formats.find(name), reasoning=THINK, tools=tools)[0]
            read = [(event[1], json.loads(event[2])) if event[0] == "call" else event[1] for event in found]
            assert read == expected, pieces
