"""The input of custom tools out of the JSON that the model writes, wherever that is cut."""

import json
import random

import pytest
from phalanx.rank.server.text.input_text import InputText
from phalanx.rank.server.text.tool_formats import find

from .parsing import cut, parse

TEXTS = ["", "SELECT 1;\n", 'a "b" \\ \t é 🙂', "\u2028{}"]
OTHERS = [
    ('{"input":"a\\ud83d\\ude00\\ud83dx\\/"}', "a😀\ufffdx/"),
    ('{"input": "cut o', "cut o"),
    ('{"input": "half \\u00', "half "),
    ('{"query": "SELECT 1"}', "SELECT 1"),
    ('{"a": 1, "b": 2}', '{"a": 1, "b": 2}'),
    ('"bare"', "bare"),
    ("no JSON", "no JSON"),
    ("{}", ""),
    ("", ""),
]


def read(pieces):
    one = InputText()
    return "".join(map(one.feed, pieces)) + one.finish()


def cases():
    for text in TEXTS:
        for ascii in (True, False):
            yield json.dumps({"input": text}, ensure_ascii=ascii), text
    yield from OTHERS


@pytest.mark.parametrize(("written", "text"), [*cases()])
def test_any_cut(written, text):
    assert read([written]) == read(list(written)) == text
    rng = random.Random(written)
    for _ in range(50):
        assert read(cut(written, rng) if written else []) == text


def test_it_comes_as_it_is_written():
    one = InputText()
    assert [one.feed(piece) for piece in ('{"inp', 'ut": "a', "b\\", "nc", '"', "}")] == ["", "a", "b", "\nc", "", ""]


def test_calls_of_custom_tools_among_others():
    text = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{"input": "a\\nb"}}}}</tool_call>' for name in ("sql", "f")
    )
    found, _ = parse(list(text), tool_format=find("hermes"), custom={"sql"})
    assert found == [("call", "sql", "a\nb"), ("call", "f", '{"input": "a\\nb"}')]
