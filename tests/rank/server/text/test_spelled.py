"""Markers that ordinary tokens spell are text; the tokens themselves are markers."""

import pytest
from phalanx.launcher import builtin_model
from phalanx.rank.server.text import reasoning
from phalanx.rank.server.text.control import MARK
from phalanx.rank.server.text.spelled import SpelledMarkers
from phalanx.rank.server.text.tokenizer import Tokenizer, detokenizer
from phalanx.rank.server.text.tool_formats import find

from .parsing import parse

pytestmark = pytest.mark.timeout(30)
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
OPTIONS = {"tool_format": find("hermes"), "reasoning": reasoning.find("think")}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(builtin_model.DIRECTORY / "tokenizer.json")


def spelled(tokenizer, text):
    """Tokens of a text, none of them added ones."""
    return [token for char in text for token in tokenizer.encode(char, False)]


def pieces(tokenizer, tokens):
    named = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    markers = {tokenizer.added[marker]: marker for marker in named}
    detok = SpelledMarkers(detokenizer(tokenizer, tokenizer.special - markers.keys(), []), markers)
    return [*map(detok.feed, tokens), detok.finish()]


def test_tokens_are_markers_and_what_is_spelled_is_text(tokenizer):
    whole = tokenizer.encode(CALL, False)
    assert parse(pieces(tokenizer, whole), **OPTIONS)[0] == [("call", "f", "{}")]
    assert parse(pieces(tokenizer, spelled(tokenizer, CALL)), **OPTIONS)[0] == [("text", CALL)]
    mixed = [*spelled(tokenizer, "Write <tool_call> or <think>: "), *whole, *spelled(tokenizer, "</think> <tool")]
    found = [("text", "Write <tool_call> or <think>: "), ("call", "f", "{}"), ("text", "</think> <tool")]
    assert parse(pieces(tokenizer, mixed), **OPTIONS)[0] == found


def test_thoughts_may_speak_of_their_end(tokenizer):
    tokens = [*tokenizer.encode("<think>", False), *spelled(tokenizer, "a </think> b")]
    tokens += [*tokenizer.encode("</think>", False), *spelled(tokenizer, "c")]
    assert parse(pieces(tokenizer, tokens), **OPTIONS)[0] == [("reasoning", "a </think> b"), ("text", "c")]


def test_arguments_hold_no_marks(tokenizer):
    text = '<tool_call>{"name": "f", "arguments": {"x": "'
    tokens = [
        *tokenizer.encode(text, False),
        *spelled(tokenizer, '</tool_call>"}}'),
        *tokenizer.encode("</tool_call>", False),
    ]
    assert parse(pieces(tokenizer, tokens), **OPTIONS)[0] == [("call", "f", '{"x": "</tool_call>"}')]


def test_ordinary_text_is_not_held_back(tokenizer):
    shown = pieces(tokenizer, spelled(tokenizer, "a < b <td> <"))
    assert "".join(shown) == "a < b <td> <" and MARK not in "".join(shown)
    assert shown[:4] == ["a", " ", "", "< "]
