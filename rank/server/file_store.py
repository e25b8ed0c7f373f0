"""Files that clients upload and that batches make: in one directory, for one server at a time.

DIR/lock            held while a server uses the directory
DIR/files/ID        a file's bytes
DIR/files/ID.json   what is known of it; written once the bytes are on the disk, so bytes without it are of an
                    upload that was cut off
DIR/batches/        the batches' own (batch/stored.py)
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
import uuid
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from ...errors import USAGE, FatalError
from .api_error import ApiError
from .durable import atomically, sync_directory
from .shares import Budget

log = logging.getLogger(__name__)
FULL = 507  # the status where there is no room
MAX_FILE = 512 << 20  # bytes, as OpenAI has it
MAX_FILES = 10_000
MAX_BYTES = 64 << 30
FLOOR_FILES = 100  # that each key may have, however many keys there are
FLOOR_BYTES = 2 * MAX_FILE
PIECE = 1 << 20  # bytes that are read together
LOCK_PATIENCE = 5.0  # seconds for an earlier server that was killed to be gone
OWN_NAME = re.compile(r"file-[0-9a-f]{24}(\.json)?|\.file-[0-9a-f]{24}\.json\.part")  # what else lies there is not ours
OFF = "this server keeps no files: start it with --file-store DIR"


def cannot_write(what: str, error: OSError) -> ApiError:
    """The client's error if the disk is full or fails."""
    return ApiError(FULL, f"the {what} cannot be written: {error.strerror}", code="files_full")


def damaged(wrong: str) -> ApiError:
    """The client's error if a file's bytes are not what was stored."""
    return ApiError(500, wrong, code="file_damaged")


def elsewhere() -> ApiError:
    """The client's error while the job before this one, or the one after it, has the files."""
    what = "another job of this service has the files for the moment; send the request again"
    return ApiError(503, what, code="files_busy", retry_after=1).not_taken()


def changed_bytes(id: str) -> str:
    return f"the bytes of file {id} are not those that were stored: the disk has changed them, upload it again"


class StoredFile(msgspec.Struct):
    """A stored file's metadata."""

    id: str
    filename: str
    bytes: int
    purpose: str  # "batch" for input, "batch_output" for what a batch has made
    created_at: int
    owner: str  # whose it is: a digest of the API key, "" where there was none
    digest: str = ""  # of its bytes; "": an earlier server has stored it, which noted none

    def body(self, wrong: str = "") -> dict[str, Any]:
        """OpenAI's file object. `wrong`: what is wrong with the file's bytes."""
        shown = {name: getattr(self, name) for name in ("id", "bytes", "created_at", "filename", "purpose")}
        status = {"status": "error" if wrong else "processed", "status_details": wrong or None}
        return {**shown, "object": "file", **status, "expires_at": None}


def new_digest() -> blake2b:
    """The hash that makes the digest of a file's bytes."""
    return blake2b(digest_size=16)


class StoreInUse(FatalError):
    """Another server uses the directory."""


def _open_lock(directory: str) -> int:
    """A descriptor of the directory's lock file; both are made. Raises FatalError where they cannot be."""
    root = Path(directory)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_mode & 0o077:
            root.chmod(0o700)  # it holds what others asked
        return os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FatalError(f"--file-store {directory}: {error.strerror or error}", USAGE) from None


def require_locks(directory: str) -> None:
    """Raises FatalError where the directory's file system has no locks, by which a job and its successor exclude each
    other."""
    lock = _open_lock(directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # the job before this one has it
        pass
    except OSError as error:
        raise FatalError(
            f"--file-store {directory}: no file can be locked there ({error.strerror or error}), so two jobs of "
            "--resubmit might write at once: take a file system with flock (Lustre: mounted with -o flock), or leave "
            "--file-store out",
            USAGE,
        ) from None
    finally:
        os.close(lock)


class FileStore:
    """The files of all API keys, each with its quota. Methods marked so wait for the disk: it is called in a thread.

    Raises FatalError where the directory cannot be used. patience: seconds for another server to be gone. locked: it is
    not used without a lock, which some file systems do not have.
    """

    def __init__(self, directory: str, keys: int = 1, patience: float = LOCK_PATIENCE, locked: bool = False):
        self.closing = False  # no file is begun any more
        self._begun: set[str] = set()  # ids of files that are being written
        self.root = Path(directory)
        self.batches = self.root / "batches"
        self._place = self.root / "files"
        self._lock = _open_lock(directory)
        try:
            for one in (self.batches, self._place):
                one.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            os.close(self._lock)
            raise FatalError(f"--file-store {directory}: {error.strerror or error}", USAGE) from None
        self._wait_for_lock(directory, patience, locked)
        self._files: dict[str, StoredFile] = {}  # the oldest first
        self._number = Budget(MAX_FILES, keys, FLOOR_FILES)
        self._bytes = Budget(MAX_BYTES, keys, FLOOR_BYTES)
        self._counted: dict[str, tuple[str, int]] = {}  # owner and bytes of what the budgets know of, by ids
        self._load()

    def _wait_for_lock(self, directory: str, patience: float, locked: bool) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self._lock)
                    raise StoreInUse(
                        f"--file-store {directory}: another server uses it; give each server its own", USAGE
                    ) from None
            except OSError as error:
                if not locked:
                    return  # a file system without locks
                os.close(self._lock)
                raise StoreInUse(f"--file-store {directory}: it cannot be locked: {error.strerror}", USAGE) from None
            time.sleep(0.1)

    def _load(self) -> None:
        known = []
        for path in self._place.glob("file-*.json"):
            try:
                known.append(msgspec.json.decode(path.read_bytes(), type=StoredFile))
            except (msgspec.DecodeError, OSError) as error:
                log.warning("%s says of no file what it is: %s", path, error)
        for one in sorted(known, key=lambda one: one.created_at):
            self._files[one.id] = one
            self._number.force(one.owner, 1)
            self._counted[one.id] = one.owner, 0
            self.count(one.id, one.owner, one.bytes)
            if wrong := self.wrong(one):
                log.warning("%s: %s", self.path(one), wrong)
        for path in self._place.iterdir():
            about = path.with_name(path.name.removesuffix(".json") + ".json")
            if OWN_NAME.fullmatch(path.name) and not about.exists():
                path.unlink(missing_ok=True)

    @property
    def writing(self) -> bool:
        """Whether a file is being written that is not kept yet."""
        return bool(self._begun)

    @property
    def held(self) -> bool:
        """Whether the directory is this server's."""
        return self._lock >= 0

    def close(self) -> None:
        """Leave the directory to another server."""
        self.closing = True
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

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
        """A file that is about to be written at its `path`; `add` keeps it. Raises ApiError where there is no room."""
        if self.closing:
            raise elsewhere()
        if self._bytes.left(owner) <= 0 or not self._number.take(owner, 1):
            raise self._full(owner)
        file = StoredFile(f"file-{uuid.uuid4().hex[:24]}", filename, 0, purpose, int(time.time()), owner)
        self._counted[file.id] = owner, 0
        self._begun.add(file.id)
        return file

    def grow(self, file: StoredFile, size: int) -> None:
        """Count bytes that are about to be written to a new file. Raises ApiError where there is no room."""
        if not self._bytes.take(file.owner, size):
            raise self._full(file.owner)
        file.bytes += size
        self._counted[file.id] = file.owner, file.bytes

    def count(self, id: str, owner: str, size: int) -> None:
        """Count so many bytes of an owner's that are on the disk already, instead of what was counted under this id."""
        _, before = self._counted.get(id, (owner, 0))
        self._bytes.force(owner, size - before)
        self._counted[id] = owner, size

    def left(self, owner: str) -> int:
        """Bytes that the owner may still store."""
        return self._bytes.left(owner)

    def _full(self, owner: str) -> ApiError:
        number, size = self._number, self._bytes
        return ApiError(
            FULL,
            f"your files are {number.held(owner)} and have {size.held(owner) >> 20} MiB, and at most {number.quota} of "
            f"{size.quota >> 20} MiB are kept for you, {number.total} of {size.total >> 20} MiB for all: delete some",
            code="files_full",
        )

    def add(self, file: StoredFile) -> None:
        """Keep a file whose bytes are at its path: they are on the disk before it returns. In a thread.

        Raises OSError.
        """
        if not self.held:
            raise OSError(errno.ESTALE, "another server has the files now")
        path, digest = self.path(file), new_digest()
        with open(path, "rb") as data:
            while part := data.read(PIECE):
                digest.update(part)
            os.fsync(data.fileno())
            size = os.fstat(data.fileno()).st_size
            os.fchmod(data.fileno(), 0o600)
        if file.bytes not in (0, size):
            raise OSError(errno.EIO, f"{file.bytes} bytes were written and {size} are there")
        sync_directory(str(path))
        file.bytes, file.digest = size, digest.hexdigest()
        self.count(file.id, file.owner, size)
        with atomically(f"{path}.json") as out:
            out.write(msgspec.json.encode(file))
        self._files[file.id] = file
        self._begun.discard(file.id)

    def forget(self, file: StoredFile) -> None:
        """Hide a file; `drop` removes it."""
        self._files.pop(file.id, None)

    def drop(self, file: StoredFile) -> None:
        """Remove a file, also one that was never added. In a thread."""
        self.forget(file)
        for path in (f"{self.path(file)}.json", self.path(file)):
            Path(path).unlink(missing_ok=True)
        self._begun.discard(file.id)
        owner, size = self._counted.pop(file.id, ("", -1))
        if size >= 0:
            self._number.give(owner, 1)
            self._bytes.give(owner, size)

    def uncount(self, id: str) -> None:
        """Forgets the bytes counted under this id."""
        owner, size = self._counted.pop(id, ("", 0))
        self._bytes.give(owner, size)

    def wrong(self, file: StoredFile) -> str:
        """The fault of a file's bytes as far as their number tells; "" if there is none. Runs in a thread."""
        try:
            size = self.path(file).stat().st_size
        except FileNotFoundError:
            return f"the bytes of file {file.id} are no longer there"
        except OSError as error:
            return f"the bytes of file {file.id} cannot be read: {error.strerror}"
        if size != file.bytes:
            return f"file {file.id} has {size} bytes, and {file.bytes} were stored: some are lost, upload it again"
        return ""

    def check(self, file: StoredFile) -> None:
        """Raises ApiError where the number of a file's bytes is not what was stored. In a thread."""
        if wrong := self.wrong(file):
            raise damaged(wrong)

    def check_whole(self, file: StoredFile) -> None:
        """Raises ApiError where a file's bytes are not what was stored. All of them are read, in a thread."""
        self.check(file)
        digest = new_digest()
        try:
            with open(self.path(file), "rb") as data:
                while part := data.read(PIECE):
                    digest.update(part)
        except OSError as error:
            raise damaged(f"the bytes of file {file.id} cannot be read: {error.strerror}") from None
        if file.digest not in ("", digest.hexdigest()):
            raise damaged(changed_bytes(file.id))
