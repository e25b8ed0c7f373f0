"""Files that clients upload and that batches make: in one directory, for one server at a time.

DIR/lock            held while a server uses the directory
DIR/files/ID        a file's bytes
DIR/files/ID.json   what is known of it; written last, so bytes without it are of an upload that was cut off
DIR/batches/        the batches' own (batch/stored.py)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from ...errors import USAGE, FatalError
from .api_error import ApiError
from .batch.journal import atomically

FULL = 507  # the status where there is no room
MAX_FILE = 512 << 20  # bytes, as OpenAI has it
MOST_FILES = 10_000
MOST_BYTES = 64 << 30
LOCK_PATIENCE = 5.0  # seconds for an earlier server that was killed to be gone
OWN_NAME = re.compile(r"file-[0-9a-f]{24}(\.json)?|\.file-[0-9a-f]{24}\.json\.part")  # what else lies there is not ours
OFF = "this server keeps no files: start it with --file-store DIR"


def cannot_write(what: str, error: OSError) -> ApiError:
    """What the client is told where the disk takes no more, or fails."""
    return ApiError(FULL, f"the {what} cannot be written: {error.strerror}", code="files_full")


class StoredFile(msgspec.Struct):
    """What is known of a file."""

    id: str
    filename: str
    bytes: int
    purpose: str  # "batch" for input, "batch_output" for what a batch has made
    created_at: int
    owner: str  # whose it is: a digest of the API key, "" where there was none

    def body(self) -> dict[str, Any]:
        """OpenAI's file object."""
        shown = {name: getattr(self, name) for name in ("id", "bytes", "created_at", "filename", "purpose")}
        return {**shown, "object": "file", "status": "processed", "status_details": None, "expires_at": None}


class FileStore:
    """Raises FatalError where the directory cannot be used."""

    def __init__(self, directory: str):
        self.root = Path(directory)
        self.batches = self.root / "batches"
        self._place = self.root / "files"
        try:
            for one in (self.root, self.batches, self._place):
                one.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.root.stat().st_mode & 0o077:
                self.root.chmod(0o700)  # it holds what others asked
            self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FatalError(f"--file-store {directory}: {error.strerror or error}", USAGE) from None
        self._wait_for_lock(directory)
        self._files: dict[str, StoredFile] = {}  # the oldest first
        self._load()

    def _wait_for_lock(self, directory: str) -> None:
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self._lock)
                    raise FatalError(
                        f"--file-store {directory}: another server uses it; give each server its own", USAGE
                    ) from None
            except OSError:
                return  # a file system without locks
            time.sleep(0.1)

    def _load(self) -> None:
        known = []
        for path in self._place.glob("file-*.json"):
            with contextlib.suppress(msgspec.DecodeError, OSError):
                known.append(msgspec.json.decode(path.read_bytes(), type=StoredFile))
        self._files = {one.id: one for one in sorted(known, key=lambda one: one.created_at) if self.path(one).exists()}
        for path in self._place.iterdir():
            if OWN_NAME.fullmatch(path.name) and path.name.removesuffix(".json") not in self._files:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def path(self, file: StoredFile) -> Path:
        return self._place / file.id

    def all(self, owner: str) -> list[StoredFile]:
        """The files of one owner, the oldest first."""
        return [one for one in list(self._files.values()) if one.owner == owner]

    def get(self, id: str, owner: str, param: str | None = None) -> StoredFile:
        """Raises ApiError 404, also for a file of somebody else."""
        file = self._files.get(id)
        if file is None or file.owner != owner:
            raise ApiError(404, f"there is no file {id[:100]!r} here", param, "file_not_found")
        return file

    def new(self, filename: str, purpose: str, owner: str) -> StoredFile:
        """A file that is about to be written at its `path`; `add` keeps it. Raises ApiError where the store is full."""
        size = sum(one.bytes for one in list(self._files.values()))  # also called in a thread
        if len(self._files) >= MOST_FILES or size >= MOST_BYTES:
            raise ApiError(
                FULL,
                f"the server's files are {len(self._files)} and have {size >> 20} MiB, and at most {MOST_FILES} of "
                f"{MOST_BYTES >> 20} MiB are kept: delete some",
                code="files_full",
            )
        return StoredFile(f"file-{uuid.uuid4().hex[:24]}", filename, 0, purpose, int(time.time()), owner)

    def add(self, file: StoredFile) -> None:
        """Keep a file whose bytes are at its path. Raises OSError."""
        file.bytes = self.path(file).stat().st_size
        self.path(file).chmod(0o600)
        with atomically(f"{self.path(file)}.json") as out:
            out.write(msgspec.json.encode(file))
        self._files[file.id] = file

    def drop(self, file: StoredFile) -> None:
        """Remove a file, also one that was never added."""
        self._files.pop(file.id, None)
        for path in (f"{self.path(file)}.json", self.path(file)):
            Path(path).unlink(missing_ok=True)
