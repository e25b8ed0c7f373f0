"""Files that a job and its successors keep for clients: each is there whole, or not at all.

root/OWNER/DIGEST: of the API key, and of the id. One job at a time answers new requests, but the one before it may
still finish what it began, so a reader looks whether a file has changed since it was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from hashlib import blake2b
from pathlib import Path

from .blocking import on_disk
from .durable import atomically
from .shares import Budget

log = logging.getLogger(__name__)
TRIM_EVERY = 256  # writes between two looks at how much there is
PATIENCE = 2.0  # seconds to wait for a file that another job may be about to write
WAIT_EVERY = 0.1  # seconds between two looks for it
SAVED_WITHIN = 5.0  # seconds that an answer waits for its file: a client shall not miss it for the disk's sake
WAITING_BYTES = 64 << 20  # bytes of contents that wait for the disk
WAITING_FLOOR = 4 << 20  # bytes of these that each key may have, however many keys there are


class _Change:
    """A file's next content, None to remove it, and whether that is on the disk."""

    def __init__(self, owner: str, content: bytes | None):
        self.owner, self.content = owner, content
        self.saved: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def size(self) -> int:
        return len(self.content or b"")


class KeptFiles:
    """At most `most` files of `most_bytes`; the oldest of the owner that has most go first.

    keys: how many owners there are. predecessor: the registry's file of the job before this one, "" for none: while
    that is there, what is missing may be about to be written.
    """

    def __init__(self, root: Path, most: int, most_bytes: int, predecessor: str = "", keys: int = 1):
        self._root, self._most, self._most_bytes = root, most, most_bytes
        self._predecessor = predecessor
        self._waiting: dict[Path, _Change] = {}
        self._budget = Budget(WAITING_BYTES, keys, WAITING_FLOOR)  # of contents that wait or are being written
        self._writing: tuple[Path, _Change] | None = None
        self._writer: asyncio.Task[None] | None = None  # one: a disk that hangs holds one thread
        self._writes = 0
        self._warned = False

    def _path(self, owner: str, id: str) -> Path:
        return self._root / (owner or "anybody") / blake2b(id.encode(errors="replace"), digest_size=16).hexdigest()

    async def get(self, owner: str, id: str, known: str = "", wait: bool = False) -> tuple[bytes, str] | None:
        """Content and version; None where there is none. The content is empty where the version is the known one.

        wait: for a file that the job before this one may be about to write.
        """
        path = self._path(owner, id)
        if (change := self._change(path)) is not None:
            await asyncio.wait([change.saved])
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE
        while True:
            found = await on_disk(_read, path, known)
            if found is not None or not (wait and self._predecessor) or loop.time() >= until:
                return found
            if not await on_disk(os.path.exists, self._predecessor):
                self._predecessor = ""
            await asyncio.sleep(WAIT_EVERY)

    def put(self, owner: str, id: str, content: bytes) -> asyncio.Future[bool]:
        """Write a file, in a thread. The future tells whether this content, or a later one, is on the disk."""
        return self._add(owner, id, content)

    def drop(self, owner: str, id: str) -> None:
        """Remove a file, in a thread."""
        self._add(owner, id, None)

    def _change(self, path: Path) -> _Change | None:
        """The last change of a file that is not on the disk yet."""
        if self._writing is not None and self._writing[0] == path:
            return self._waiting.get(path, self._writing[1])
        return self._waiting.get(path)

    def _add(self, owner: str, id: str, content: bytes | None) -> asyncio.Future[bool]:
        path = self._path(owner, id)
        change = self._waiting.get(path)
        if change is None:
            change = _Change(owner, content)
        else:  # the earlier content needs no writing any more
            self._budget.give(owner, change.size)
            change.content = content
        if content is not None and not self._budget.take(owner, change.size):
            if self._budget.held(owner):
                self._waiting.pop(path, None)
                change.saved.set_result(False)
                self._warn("the disk is too slow: what waits for it has reached its limit")
                return change.saved
            self._budget.force(owner, change.size)  # one may be as large as it can
        self._waiting[path] = change
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write_waiting())
        return change.saved

    async def _write_waiting(self) -> None:
        while self._waiting:
            path, change = next(iter(self._waiting.items()))
            del self._waiting[path]
            self._writing, content = (path, change), change.content
            try:
                if content is None:
                    await on_disk(path.unlink, missing_ok=True)
                else:
                    await on_disk(_write, path, content)
                saved = True
            except OSError as error:
                self._warn(str(error))
                saved = False
            self._budget.give(change.owner, change.size)
            self._writing = None
            change.saved.set_result(saved)
            self._writes += content is not None
            if content is not None and self._writes % TRIM_EVERY == 1:
                with contextlib.suppress(OSError):
                    await on_disk(self._trim)

    def _warn(self, why: str) -> None:
        if not self._warned:
            log.warning("what clients go on from cannot be kept for the next job: %s", why)
        self._warned = True

    async def flush(self, seconds: float | None = None) -> bool:
        """Wait until all is written that was put before, for so long at most. Returns whether it is."""
        if self._writer is None:
            return True
        _, pending = await asyncio.wait([self._writer], timeout=seconds)
        return not pending

    async def saved(self, owner: str, id: str) -> None:
        """Wait for a file's last change, but not for ever."""
        if (change := self._change(self._path(owner, id))) is not None:
            await asyncio.wait([change.saved], timeout=SAVED_WITHIN)

    def _trim(self) -> None:
        """Remove what is too much. In a thread."""
        owners: dict[Path, list[tuple[float, int, Path]]] = {}
        for path in self._root.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                owners.setdefault(path.parent, []).append((status.st_mtime, status.st_size, path))
        for files in owners.values():
            files.sort(reverse=True)
        number = sum(map(len, owners.values()))
        size = sum(one[1] for files in owners.values() for one in files)
        while number > self._most or size > self._most_bytes:
            by_bytes = number <= self._most
            files = max(owners.values(), key=lambda some: sum(one[1] for one in some) if by_bytes else len(some))
            _, freed, path = files.pop()
            number, size = number - 1, size - freed
            path.unlink(missing_ok=True)


def _read(path: Path, known: str) -> tuple[bytes, str] | None:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            version = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
            return (b"" if version == known else file.read()), version
    except FileNotFoundError:
        return None


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A job on another host may write the same file, in a process of the same number.
    with atomically(str(path), writer=f".{uuid.uuid4().hex}", mode=0o600) as file:
        file.write(content)
