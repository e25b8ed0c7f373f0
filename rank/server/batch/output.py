"""The lines of the output and of the errors file, and how both appear at the end: whole, at once, each line once."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from ....errors import ERROR, FatalError
from ..api_error import ApiError
from ..durable import atomically
from ..json_line import encode
from .batch_input import Item, Reader, id_key, read
from .journal import ANSWERED, FAILED, Entry, Journal, NoRoom

HEAD = 33  # characters of an entry's kind and key


def answer(item: Item, request_id: str, body: dict[str, Any]) -> bytes:
    """OpenAI's line for an answered request."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return encode({"id": _id(item), "custom_id": item.custom_id, "response": response, "error": None})


def failure(item: Item, error: ApiError) -> bytes:
    """And for one that was refused; `line` and `file` are ours."""
    return _error(
        item,
        {"status_code": error.status, "request_id": "", "body": error.body()},
        error.code or error.body()["error"]["type"],
        error.message,
    )


def mistake(item: Item) -> bytes:
    """For a line that is no request."""
    return _error(item, None, item.code, item.wrong)


def _error(item: Item, response: dict[str, Any] | None, code: str, message: str) -> bytes:
    place = {"line": item.line} | ({"file": item.file} if item.file else {})
    error = {"code": code, "message": message}
    return encode({"id": _id(item), "custom_id": item.custom_id, **place, "response": response, "error": error})


def _id(item: Item) -> str:
    return f"batch_req_{item.key:032x}"


def entry(item: Item, kind: str, prompt_tokens: int = 0, output_tokens: int = 0) -> Entry:
    return Entry(kind, f"{item.key:032x}", f"{item.digest:016x}", item.file, item.line, prompt_tokens, output_tokens)


def write(journal: Journal, seen: set[int], output: str, errors: str, ordered: bool) -> int:
    """Make both files of the journal; the errors file only where there is something to tell.

    `seen` are the keys of all lines of the input. Returns how many lines of the journal are not among them any more:
    they are left out. Empties `seen`.
    """
    try:
        with contextlib.ExitStack() as stack:
            # Left in the opposite order: the output appears last, and with it all is there.
            files: dict[str, Any] = {ANSWERED: stack.enter_context(atomically(output))}
            orphans = 0
            for kind, line in _in_order(journal) if ordered else _as_written(journal):
                key = int(kind[1:], 16)
                if key not in seen:
                    orphans += 1
                    continue
                seen.remove(key)
                if kind[0] == FAILED and FAILED not in files:
                    files[FAILED] = stack.enter_context(atomically(errors))
                files[kind[0]].write(line + b"\n")
            if seen:
                raise FatalError(
                    f"journal {journal.path} lost {len(seen)} requests; the same command does them again", ERROR
                )
        return orphans
    except OSError as error:
        raise NoRoom(
            f"-o {output}: {error.strerror}; every answer is in {journal.path}, and the same command goes on there "
            "once the output can be written"
        ) from None


def _as_written(journal: Journal) -> Iterator[tuple[str, bytes]]:
    for one, content, _ in journal.entries():
        yield one.kind + one.key, content


def _in_order(journal: Journal) -> Iterator[tuple[str, bytes]]:
    """Answers by file and line. A line takes about a hundred bytes of memory here."""
    names = {name: place for place, name in enumerate(sorted({one.file for one, _, _ in journal.entries()}))}
    places, ends, lengths = array("Q"), array("Q"), array("Q")
    heads = bytearray()
    for one, content, end in journal.entries():
        places.append(names[one.file] << 40 | one.line)
        ends.append(end)
        lengths.append(len(content))
        heads += (one.kind + one.key).encode()
    for at in sorted(range(len(places)), key=places.__getitem__):
        yield heads[at * HEAD : (at + 1) * HEAD].decode(), journal.read(ends[at] - lengths[at], lengths[at])


class _Written(msgspec.Struct):
    custom_id: str | None = None
    file: str = ""
    line: int = 0


def is_complete(input: str, output: str, errors: str) -> bool:
    """Whether output and errors file answer exactly the lines of the input, so that nothing is left to do."""
    if input == "-":
        return False
    reader = Reader(input, {})
    places: dict[tuple[str, int], int] = {}
    for item in reader:
        if item.custom_id is None:
            places[item.file, item.line] = item.key
    try:
        for path in (output, errors):
            if not os.path.exists(path):
                continue
            for _, _, raw in read(path):
                one = msgspec.json.decode(raw, type=_Written)
                key = places.get((one.file, one.line)) if one.custom_id is None else id_key(one.custom_id)
                if key not in reader.seen:
                    return False
                reader.seen.remove(key)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return not reader.seen
