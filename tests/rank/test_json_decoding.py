"""JSON of strangers: each fault is a ValueError in words, without a byte of the text."""

import math

import msgspec
import pytest
from phalanx.rank import json_decoding

DEEP = "[" * 100_000, '{"a":' * 100_000, '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


class Named(msgspec.Struct):
    name: str


def test_values():
    assert json_decoding.decode_object('{"name": "é", "limit": Infinity}'.encode()) == {"name": "é", "limit": math.inf}
    assert json_decoding.decode_as('{"name": "é", "more": [1]}'.encode(), Named) == Named("é")
    with pytest.raises(ValueError, match="list"):
        json_decoding.decode_object(b"[1]")


@pytest.mark.parametrize("text", DEEP, ids=range(3))
def test_nested_too_deeply(text):
    with pytest.raises(ValueError, match="nested"):
        json_decoding.decode_object(text.encode())
    with pytest.raises(ValueError, match="not valid JSON"):
        json_decoding.decode_as(text.encode(), dict[str, msgspec.Raw])


@pytest.mark.parametrize("data", [b"s3cr3t", b"\xffs3cr3t", b'{"s3cr3t', b"", b"1" * 5000])
def test_text_that_is_no_json_is_not_shown(data):
    for decode in (json_decoding.decode_object, lambda data: json_decoding.decode_as(data, Named)):
        with pytest.raises(ValueError, match="not valid JSON") as caught:
            decode(data)
        assert "s3cr3t" not in str(caught.value) and len(str(caught.value)) < 200
