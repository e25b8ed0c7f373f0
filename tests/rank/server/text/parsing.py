"""Runs the output parser over text that is cut in many ways; what comes out must not depend on that."""

import random

from phalanx.rank.server.text.events import Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart
from phalanx.rank.server.text.output_parser import OutputParser


def parse(pieces, **options):
    """The events of text in these pieces, each kind as (kind, text), a call as ("call", name, arguments); and the stop
    string. Checks that calls begin and end one after the other.
    """
    parser, events = OutputParser(**options), []
    for piece in pieces:
        parser.feed(piece, events)
        if parser.stopped:
            break
    parser.finish(events)
    found, calls, open_call = [], 0, False
    for event in events:
        if isinstance(event, ToolCallStart):
            assert not open_call and event.index == calls and event.id and event.name
            found.append(("call", event.name, ""))
            calls, open_call = calls + 1, True
        elif isinstance(event, ToolCallArguments):
            assert open_call and event.index == calls - 1 and event.text
            found[-1] = (*found[-1][:2], found[-1][2] + event.text)
        elif isinstance(event, ToolCallEnd):
            assert open_call and event.index == calls - 1
            open_call = False
        else:
            assert event.text
            kind = {Text: "text", Reasoning: "reasoning"}[type(event)]
            if found and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1] + event.text)
            else:
                found.append((kind, event.text))
    assert not open_call and calls == parser.calls
    return found, parser.stop_string


def cut(text, rng):
    """The text in up to thirteen pieces."""
    at = sorted(rng.sample(range(1, len(text)), rng.randint(0, min(12, len(text) - 1)))) if len(text) > 1 else []
    return [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)]


def check(text, expected, stop=None, **options):
    """Whole, letter by letter, in two at every place and at random."""
    assert parse([text], **options) == (expected, stop)
    assert parse(list(text), **options) == (expected, stop)
    for at in range(len(text)):
        assert parse([text[:at], text[at:]], **options) == (expected, stop), text[:at]
    rng = random.Random(text)
    for _ in range(100):
        pieces = cut(text, rng)
        assert parse(pieces, **options) == (expected, stop), pieces
