"""A body's values are counted while it is bytes, wherever its parts end."""

import json

import pytest
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.body_values import BodyValues

MANY = {
    "prompts": b'{"prompt":[' + b"[1]," * 300_000 + b"[1]]}",
    "empty lists": b'{"metadata":[' + b"[]," * 300_000 + b"[]]}",
    "objects": b'{"messages":[' + b"{} , " * 300_000 + b"{}]}",
    "texts": b'{"messages":[{"role":"user","content":[' + b'"a",' * 300_000 + b'"a"]}]}',
    "texts that end with backslashes": b'{"stop":[' + rb'"\\",' * 300_000 + b'"a"]}',
    "biases": json.dumps({"logit_bias": dict.fromkeys(range(300_000), 1)}).encode(),
    "numbers": b'{"metadata":[' + b"1," * 2_000_000 + b"1]}",
}


def check(body, context, size):
    values = BodyValues()
    for at in range(0, len(body), size):
        values.feed(body[at : at + size])
    values.check(context)
    return values


@pytest.mark.parametrize("kind", MANY)
def test_a_body_of_many_values(kind):
    with pytest.raises(ApiError) as error:
        check(MANY[kind], 512, 1000)
    assert error.value.status == 400 and error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("size", [1 << 20, 65537, 101])
@pytest.mark.parametrize("text", ['"role": ["a"],[1],{}\\', ",[{" * 100, '\\\\"[,', "\n\t,,[[", "\\"])
def test_a_text_is_not_many_values(text, size):
    """A text counts once, whatever it has in it and wherever a part of it ends."""
    body = json.dumps({"prompt": [text * 50_000, "a\\", text]}).encode()
    values = check(body, 512, size)
    assert (values._lists, values._commas, values._marks) == (2, 2, 8)


def test_usual_bodies():
    check(json.dumps({"prompt": [list(range(500))] * 2000}).encode(), 512, 65536)
    check(json.dumps({"input": ["word"] * 4096}).encode(), 512, 65536)
    for other in (b"{", b"", b'{"messages": [1, }', b"\xff", b'"', b'{"a": 1}', b"\\"):
        check(other, 1, 1)
