"""The input: OpenAI's batch lines {custom_id, method, url, body}, read once from first to last in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import IO, Any

import msgspec

from ....errors import ERROR, USAGE, FatalError
from ..decoding import not_utf8, show
from ..http.routes import Route, batchable

MAX_LINE = 16 << 20
HEAD = 1 << 16  # bytes at a file's beginning by which it is known again
_BOM = b"\xef\xbb\xbf"


class Item(msgspec.Struct):
    """A line that is to be answered or, where it is none, reported. `key` is what it is known by."""

    file: str  # a name in the directory; "" where the input is one file or a pipe
    line: int
    key: int
    digest: int
    custom_id: str | None = None
    route: Route | None = None
    body: bytes | msgspec.Raw = b""
    wrong: str = ""  # why it is not a request
    code: str = ""

    @property
    def where(self) -> str:
        return f"{self.file} line {self.line}" if self.file else f"line {self.line}"


class _Fields(msgspec.Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Fields)


def digest(data: bytes, size: int) -> int:
    return int.from_bytes(blake2b(data, digest_size=size).digest())


def id_key(custom_id: str) -> int:
    """128 bits for a custom_id: millions of them fit in memory."""
    return digest(custom_id.encode("utf-8", "surrogatepass"), 16)


def line_key(file: str, line: int, raw: bytes) -> int:
    """For a line that has no custom_id of its own."""
    return digest(b"\0%s:%d:%s" % (file.encode(), line, raw), 16)


def files(path: str) -> list[str]:
    """The names of a directory's files, in their order; [""] where the input is one file or a pipe."""
    if path == "-" or not os.path.isdir(path):
        return [""]
    return sorted(name for name in os.listdir(path) if name.endswith(".jsonl") and not name.startswith("."))


def check(path: str) -> None:
    """Raises FatalError where there is nothing to read."""
    if path == "-":
        return
    try:
        names = files(path)
        for name in names:
            with open(os.path.join(path, name) if name else path, "rb"):
                pass
    except OSError as error:
        raise FatalError(f"-i {error.filename}: {error.strerror}", USAGE) from None
    if not names:
        raise FatalError(f"-i {path}: the directory has no file whose name ends with .jsonl", USAGE)


class Known(msgspec.Struct):
    """A journal's record of one input file. A file may grow: what was in it must stay."""

    name: str
    size: int
    head: str  # digest of its first bytes


def fingerprint(path: str) -> list[Known]:
    """Nothing is known of a pipe."""
    found = []
    for name in files(path) if path != "-" else []:
        with open(os.path.join(path, name) if name else path, "rb") as file:
            head = file.read(HEAD)
            found.append(Known(name, os.fstat(file.fileno()).st_size, blake2b(head, digest_size=16).hexdigest()))
    return found


def changed(path: str, known: list[Known]) -> str:
    """A message on how the input differs from what it was; "" where it is the same, or has only grown."""
    names = files(path)
    for one in known if path != "-" else []:
        if one.name not in names:
            return f"{one.name} is no longer there" if one.name else "it was one file"
        with open(os.path.join(path, one.name) if one.name else path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = blake2b(file.read(min(HEAD, one.size)), digest_size=16).hexdigest()
        what = one.name or "the file"
        if size < one.size:
            return f"{what} had {one.size} bytes and has {size} now"
        if head != one.head:
            return f"{what} begins with other requests"
    return ""


def count(path: str) -> int:
    """Lines of the input, for the progress; 0 where that cannot be known."""
    total = 0
    for name in files(path) if path != "-" else []:
        last = b"\n"
        with open(os.path.join(path, name) if name else path, "rb") as file:
            while data := file.read(1 << 20):
                total += data.count(b"\n")
                last = data
        total += not last.endswith(b"\n")
    return total


def parse(file: str, line: int, raw: bytes) -> Item:
    """One line. What is wrong with it is in the item; whether its body is a good request shows later."""
    item = Item(file, line, 0, digest(raw, 8))
    item.wrong, item.code = _parse(raw, item)
    item.key = id_key(item.custom_id) if item.custom_id else line_key(file, line, raw)
    return item


def _parse(raw: bytes, item: Item) -> tuple[str, str]:
    if len(raw) > MAX_LINE:
        return f"the line is longer than {MAX_LINE >> 20} MiB", "line_too_long"
    try:
        fields = _decoder.decode(raw)
    except RecursionError:
        return "the line is nested too deeply", "invalid_json"
    except msgspec.ValidationError:
        return f"the line is {show_raw(raw)}: a JSON object with custom_id, method, url and body is needed", "invalid"
    except msgspec.DecodeError as error:
        return f"the line is not JSON: {error}", "invalid_json"
    except UnicodeDecodeError:
        return f"the line is not UTF-8, as JSON has to be: {not_utf8(raw)}", "invalid_json"
    name = fields.custom_id
    if not isinstance(name, str) or not name:
        return ("custom_id is missing" if name is None else f"custom_id is {show(name)}: a text is needed"), "custom_id"
    item.custom_id = name
    if fields.method not in (None, "POST"):
        return f"method is {show(fields.method)}: only POST is possible", "method"
    url = fields.url
    if url is None:
        return f"url is missing: one of {', '.join(batchable())} is needed", "url"
    path = url if not isinstance(url, str) or url.startswith("/v1/") else "/v1" + url
    if not isinstance(path, str) or path not in batchable():
        return f"url is {show(url)}: one of {', '.join(batchable())} is needed", "url"
    if not bytes(fields.body):
        return "body is missing", "body"
    item.route, item.body = batchable()[path], fields.body
    return "", ""


def show_raw(raw: bytes) -> str:
    text = raw[:80].decode(errors="replace")
    return text if len(raw) <= 80 else text[:77] + "..."


def read(path: str) -> Iterator[tuple[str, int, bytes]]:
    """Every line that is not empty: its file, its number and its bytes. Of one that is too long, the beginning."""
    for name in files(path):
        opened: contextlib.AbstractContextManager[IO[bytes]]
        if path == "-":
            opened = contextlib.nullcontext(sys.stdin.buffer)
        else:
            opened = open(os.path.join(path, name) if name else path, "rb")  # noqa: SIM115
        with opened as file:
            number = 0
            while raw := file.readline(MAX_LINE + 2):
                number += 1
                part = raw
                while part and not part.endswith(b"\n") and len(raw) > MAX_LINE:
                    part = file.readline(1 << 20)
                if number == 1:
                    raw = raw.removeprefix(_BOM)
                raw = raw.strip()
                if raw:
                    yield name, number, raw


class Reader:
    """Goes through the input once. What the journal has already is passed over; each custom_id counts once."""

    def __init__(self, path: str, finished: Mapping[int, int]):
        self.path = path
        self.finished = finished  # key -> digest of the line that was answered
        self.seen: set[int] = set()
        self.lines = 0

    def __iter__(self) -> Iterator[Item]:
        try:
            for file, line, raw in read(self.path):
                self.lines += 1
                item = parse(file, line, raw)
                if item.key in self.seen:
                    item.wrong = f"custom_id {show(item.custom_id)} is that of an earlier line"
                    item.code, item.custom_id, item.key = "duplicate", None, line_key(file, line, raw)
                self.seen.add(item.key)
                before = self.finished.get(item.key)
                if before is None:
                    yield item
                elif before != item.digest:
                    raise FatalError(
                        f"the input changed since the journal was begun: {item.where} is not the request "
                        f"{show(item.custom_id)} that was answered; give the old input back, or begin anew with "
                        "--overwrite",
                        USAGE,
                    )
        except OSError as error:
            raise FatalError(f"the input cannot be read on: {error.strerror or error}", ERROR) from None


class Feed:
    """Runs an iterator in a thread, a few items ahead of the loop that takes them."""

    def __init__(self, items: Iterator[Item], ahead: int = 64):
        self._items = items
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue()
        self._room = threading.Semaphore(ahead)
        self._closed = False
        threading.Thread(target=self._run, name="input", daemon=True).start()

    def _run(self) -> None:
        end: Exception | None = None
        try:
            for item in self._items:
                self._room.acquire()
                if self._closed:
                    return
                self._put(item)
        except Exception as error:
            end = error
        self._put(end)

    def _put(self, what: Item | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, what)

    def close(self) -> None:
        """The thread ends with the item that it reads now."""
        self._closed = True
        self._room.release()

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> Item:
        what = await self._queue.get()
        self._room.release()
        if what is None:
            raise StopAsyncIteration
        if isinstance(what, Exception):
            raise what
        return what
