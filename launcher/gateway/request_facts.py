"""Facts of a request's body that a gateway reads: its model, and the beginning by which equal prompts go to the same
job."""

from __future__ import annotations

import zlib
from hashlib import blake2b
from typing import Any

import msgspec

MAX_INFLATED = 64 << 20  # bytes of a gzip body that are looked at
PREFIX = 4096  # bytes of a prompt that count


class _Body(msgspec.Struct):
    model: Any = None
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    role: Any = None


class Facts(msgspec.Struct, frozen=True):
    """The facts that decide where a request goes."""

    model: str = ""  # "": the request names none
    prefix: bytes = b""  # a digest; b"": there is no prompt


_bodies = msgspec.json.Decoder(_Body)
_lists = msgspec.json.Decoder(list[msgspec.Raw])
_messages = msgspec.json.Decoder(_Message)


def read(body: bytes, coding: str = "") -> Facts:
    """The facts of a JSON body. One that cannot be read has none: the job names its fault."""
    try:
        if coding in ("gzip", "x-gzip"):
            body = zlib.decompressobj(wbits=31).decompress(body, MAX_INFLATED)
        found = _bodies.decode(body)
    except (msgspec.DecodeError, zlib.error, RecursionError):
        return Facts()
    begin = [bytes(one) for one in (found.system, found.instructions, found.tools)]
    begin += _beginning(bytes(found.messages) or bytes(found.input) or bytes(found.prompt))
    digest = blake2b(b"\0".join(begin), digest_size=16).digest() if any(begin) else b""
    return Facts(found.model if isinstance(found.model, str) else "", digest)


def _beginning(prompt: bytes) -> list[bytes]:
    """Messages up to the user's first, which all later requests of a conversation begin with; of a text its start."""
    try:
        items = _lists.decode(prompt)
    except msgspec.DecodeError:
        return [prompt[:PREFIX]]
    taken = []
    for item in items:
        taken.append(bytes(item))
        try:
            if _messages.decode(item).role == "user":
                return taken
        except msgspec.DecodeError:  # no message: a prompt of token ids, or a list of texts
            return [prompt[:PREFIX]]
    return taken
