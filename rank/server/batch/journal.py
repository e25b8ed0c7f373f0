"""The journal: each finished request as one line, written and fsynced once. What is in it is never computed again.

A line is a checksum, an Entry as JSON and the line for the output, separated by tabs. A line counts once it is whole:
what a kill or a full disk tore off is cut away at the next start, and a line that was damaged later is done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from zlib import crc32

import msgspec

from ....errors import ERROR, USAGE, FatalError
from ..durable import sync_directory
from .batch_input import Known, changed, fingerprint

ANSWERED, FAILED, HEADER = "o", "e", "h"
GAP = 0.05  # seconds between commits: a shared file system is spared, and what comes meanwhile goes together
MAX_PENDING = 64 << 20  # bytes that wait for the disk before no more requests are taken
LOCK_PATIENCE = 5.0  # seconds for an earlier job that was killed to be gone
VERSION = 2  # 1 did not tell the weights


class Entry(msgspec.Struct, array_like=True):
    """A journal line without its content."""

    kind: str
    key: str = ""  # hexadecimal, as `lines.Item` has it
    digest: str = ""
    file: str = ""
    line: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class _Version(msgspec.Struct):
    """The version of a header of any shape."""

    version: int = 1


class Header(msgspec.Struct):
    """The facts that all lines share. Another input or setup cannot go on with this journal."""

    input: list[Known]
    setup: dict[str, Any]
    version: int = VERSION


_entries = msgspec.json.Decoder(Entry)


def pack(entry: Entry, content: bytes) -> bytes:
    rest = b"%s\t%s" % (msgspec.json.encode(entry), content)
    return b"%08x\t%s\n" % (crc32(rest), rest)


def unpack(line: bytes) -> tuple[Entry, bytes] | None:
    """None for a line that is torn or damaged."""
    try:
        found = _checked(line)
        return None if found is None else (_entries.decode(found[0]), found[1])
    except ValueError:
        return None


def _checked(line: bytes) -> tuple[bytes, bytes] | None:
    """The entry as JSON, and the content, of a line that is as it was written; else None, or ValueError is raised."""
    check, _, rest = line.removesuffix(b"\n").partition(b"\t")
    if not line.endswith(b"\n") or int(check, 16) != crc32(rest):
        return None
    head, _, content = rest.partition(b"\t")
    return head, content


def _version(line: bytes) -> int | None:
    """The version of the journal that begins with this line; None for a line that is no header."""
    try:
        found = _checked(line)
        if found is None or msgspec.json.decode(found[0])[0] != HEADER:
            return None
        return msgspec.json.decode(found[1], type=_Version).version
    except (ValueError, LookupError, TypeError):
        return None


class Found(msgspec.Struct):
    """The state that an earlier start left."""

    finished: dict[int, int] = {}  # key -> digest of its line
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    torn: int = 0  # bytes cut off the end
    damaged: int = 0  # lines passed over


class NoRoom(FatalError):
    """The disk takes no more, or fails. What was written before stays, and can be gone on with."""

    def __init__(self, message: str):
        super().__init__(message, ERROR)


class Journal:
    """Open for one process at a time. Raises FatalError in every case that a user has to know of."""

    def __init__(self, path: str, input: str, setup: dict[str, Any], overwrite: bool = False):
        self.path = path
        self._input = input
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FatalError(f"journal {path}: {error.strerror}", USAGE) from None
        try:
            self._lock()
            if overwrite:
                os.ftruncate(self._fd, 0)
            self._begin(Header(fingerprint(input), setup))
        except BaseException:
            os.close(self._fd)
            raise
        self._pending: list[bytes] = []
        self.pending_bytes = 0
        self._committing: asyncio.Task[None] | None = None
        self._next: asyncio.Future[None] | None = None
        self._failure: FatalError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    def _lock(self) -> None:
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return  # a file system without locks
            if time.monotonic() > deadline:
                raise FatalError(
                    f"journal {self.path}: another job writes it; wait for its end, or choose another -o", USAGE
                )
            time.sleep(0.1)

    def _begin(self, mine: Header) -> None:
        """Compare with the header that is there, or write one."""
        with open(self.path, "rb") as file:
            line = file.readline()
        version = _version(line)
        self._size = os.fstat(self._fd).st_size
        if version is None:
            if line.endswith(b"\n"):
                raise FatalError(
                    f"{self.path} is no journal of `phalanx batch`: remove it, or choose another -o", USAGE
                )
            os.ftruncate(self._fd, 0)  # killed while it was begun
            self._size = 0
            self._write(pack(Entry(HEADER), msgspec.json.encode(mine)))
            sync_directory(self.path)
            return
        if version < VERSION:
            why = "it was written by an older phalanx, which did not note the model's weights"
        elif version > VERSION:
            why = "it was written by a newer phalanx"
        else:
            why = self._differs(line, mine)
        if why:
            raise FatalError(
                f"journal {self.path} cannot be gone on with: {why}; give the old one back, or begin anew with "
                "--overwrite",
                USAGE,
            )

    def _differs(self, line: bytes, mine: Header) -> str:
        """Why a job with another header of this version cannot go on; "" where it can."""
        found = unpack(line)
        try:
            if found is None:
                return "its first line cannot be read"
            theirs = msgspec.json.decode(found[1], type=Header)
        except msgspec.DecodeError as error:
            return f"its first line cannot be read: {error}"
        if why := changed(self._input, theirs.input):
            return f"the input changed since: {why}"
        for name, value in mine.setup.items():
            if theirs.setup.get(name) != value:
                return f"{name} was {theirs.setup.get(name)!r} and is {value!r} now"
        return ""

    def recover(self) -> Found:
        """All that is done. Cuts off what is torn."""
        found = Found()
        whole = 0
        for entry, _, end in self._scan():
            whole = end
            if entry is None:
                found.damaged += 1
                continue
            key = int(entry.key or "0", 16)
            if entry.kind == HEADER or key in found.finished:
                continue
            found.finished[key] = int(entry.digest, 16)
            found.answered += entry.kind == ANSWERED
            found.failed += entry.kind == FAILED
            found.prompt_tokens += entry.prompt_tokens
            found.output_tokens += entry.output_tokens
        found.torn = self._size - whole if whole else 0
        if found.torn:
            self._size = whole
            os.ftruncate(self._fd, whole)
            os.fsync(self._fd)
        return found

    def entries(self) -> Iterator[tuple[Entry, bytes, int]]:
        """Every whole line after the header, with where its content ends in the file."""
        for entry, content, end in self._scan():
            if entry is not None and entry.kind != HEADER:
                yield entry, content, end - 1

    def _scan(self) -> Iterator[tuple[Entry | None, bytes, int]]:
        """Every line that has its end: its entry, or None where it is damaged; its content, and where it ends."""
        end = 0
        with open(self.path, "rb", buffering=1 << 20) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                entry, content = unpack(line) or (None, b"")
                yield entry, content, end

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    async def add(self, entry: Entry, content: bytes) -> None:
        """Returns once the line is on the disk; lines that come close together share one fsync."""
        if self._failure is not None:
            raise self._failure
        line = pack(entry, content)
        self._pending.append(line)
        self.pending_bytes += len(line)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._committing is None:
            self._committing = asyncio.ensure_future(self._commit())
        await asyncio.shield(self._next)

    def append(self, lines: Iterable[tuple[Entry, bytes]]) -> None:
        """Lines at once, where no loop runs and nothing else is added. Raises FatalError."""
        self._write(b"".join(pack(entry, content) for entry, content in lines))

    async def _commit(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            began = loop.time()
            done, self._next = self._next, None
            assert done is not None
            data = b"".join(self._pending)
            self._pending.clear()
            try:
                await loop.run_in_executor(self._thread, self._write, data)
            except FatalError as stop:
                self._failure = stop
                done.set_exception(stop)
                if self._next is not None:
                    self._next.set_exception(stop)
                break
            self.pending_bytes -= len(data)
            done.set_result(None)
            await asyncio.sleep(GAP - (loop.time() - began))
        self._committing = None

    def _write(self, data: bytes) -> None:
        """All of it, on the disk; or nothing."""
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._fd, left) :]
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise NoRoom(
                f"journal {self.path}: {error.strerror}; what was finished before is in it, and the same command goes "
                "on there once it can be written"
            ) from None
        self._size += len(data)

    async def flush(self) -> None:
        """Wait until all that was added is on the disk, or is known not to be."""
        while self._committing is not None:
            await asyncio.wait([self._committing])

    def remove(self) -> None:
        """The output has everything."""
        os.unlink(self.path)
        sync_directory(self.path)

    def close(self) -> None:
        self._thread.shutdown()
        os.close(self._fd)
