"""Copies a model to the node's own disk or memory (--stage). The node's ranks, and later jobs, read the copy.

The rank that gets the lock copies. The node's other ranks wait for the lock and find the copy, so no rank needs to know
which ranks share its node. A file gets its name only when it is complete: an interrupted job leaves none that looks
complete. A note next to the files records each original's size and time of change, because not every file system can
store that time exactly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ....errors import USAGE, FatalError
from ... import untrusted_files
from ...checkpoint_files import directory, is_gguf, weight_files
from ...gguf import checkpoint
from ...safetensors_header import INDEX

SMALL = ("config.json", "generation_config.json", INDEX)
CHUNK = 16 << 20  # bytes of one read
COPIES = 4  # files copied at once: network file systems are faster with several readers
LOOK = 0.2  # seconds between progress reports
LOCK, NOTE, PART = ".lock", ".copies", ".part"

Identity = list[int]  # a file's size and its time of change in nanoseconds


def make_local_copy(
    source: Path, into: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Path, int]:
    """Copy the model directory or GGUF file `source` to a directory below `into`. Returns the copy and the bytes that
    this call copied.

    Files that have not changed since they were copied are not copied again. Raises FatalError with a message for the
    user.
    """
    name = f"{source.name}-{hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]}"
    target = into / name
    try:
        into.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            target.mkdir(mode=0o700)
        found = target.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise FatalError(f"--stage {into}: {target} is not ours; give a directory that only you write to", USAGE)
        with _locked(target / LOCK):
            copied = _bring(source, target, into, progress)
            if is_gguf(source):
                checkpoint.pair(target / source.name, checkpoint.mmproj(source) or "")
                return target / source.name, copied
            return target, copied
    except OSError as error:
        raise FatalError(f"--stage {into}: {error.filename or target}: {error.strerror}", USAGE) from None


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a file lock. Waiting does not spin, and the kernel frees the lock of a process that dies."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _names(source: Path) -> list[str]:
    """The files that ranks read."""
    weights = weight_files(source)
    if is_gguf(source):
        return [name for name in weights if not os.path.isabs(name)]  # a mmproj file is read where it lies
    for name in weights:
        if os.path.basename(name) != name:  # it would be written outside the copy
            raise FatalError(
                f"{source}: {name}, which the index names, is in another directory: it cannot be staged", USAGE
            )
    return ["config.json", *(name for name in SMALL[1:] if (source / name).exists()), *weights]


def _bring(source: Path, target: Path, into: Path, progress: Callable[[int, int], None]) -> int:
    names, folder = _names(source), directory(source)
    copies = _noted(target)
    there = {name for name in names if _is_copy(folder / name, target / name, copies.get(name))}
    missing = [name for name in names if name not in there]
    for file in target.iterdir():
        if file.name not in (LOCK, NOTE, *there):
            file.unlink()  # left by an interrupted copy or an earlier version of the model
    total = sum((folder / name).stat().st_size for name in missing)
    free = shutil.disk_usage(target).free
    if total > free:
        raise _no_space(into, f"{total / 1e9:.2f} GB are to be copied, {free / 1e9:.2f} GB are free")
    if missing:
        _Copy(folder, target, into, {name: copies[name] for name in there}).run(missing, total, progress)
    return total


def _identity(found: os.stat_result) -> Identity:
    return [found.st_size, found.st_mtime_ns]


def _noted(target: Path) -> dict[str, Identity]:
    """The identities of the originals, by file name; also of files that are no longer there."""
    try:
        return dict(json.loads((target / NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # no note yet, or one cut short by a power failure
        return {}


def _is_copy(file: Path, copy: Path, noted: Identity | None) -> bool:
    try:
        found = file.stat()
        return noted == _identity(found) and copy.stat().st_size == found.st_size
    except FileNotFoundError:
        return False


def _no_space(into: Path, text: str) -> FatalError:
    return FatalError(f"--stage {into}: {text}; free some, or load without --stage", USAGE)


class _Copy:
    """One run of copying. copies: the identities of the files that are complete already."""

    def __init__(self, source: Path, target: Path, into: Path, copies: dict[str, Identity]):
        self._source, self._target, self._into = source, target, into
        self._copies = copies
        self._done = 0
        self._lock = threading.Lock()
        self._failed = False

    def run(self, names: list[str], total: int, progress: Callable[[int, int], None]) -> None:
        """Copy the files. When all copies have ended, raises the error of the first that failed."""
        progress(0, total)
        self._note()  # without the files that are about to be replaced
        with ThreadPoolExecutor(COPIES, "stage") as pool:
            left = [pool.submit(self._one, name) for name in names]
            under_way = set(left)
            while under_way:
                _, under_way = wait(under_way, LOOK)
                progress(self._done, total)
        for future in left:
            future.result()

    def _one(self, name: str) -> None:
        part = self._target / (name + PART)
        try:
            if name in SMALL:
                original = untrusted_files.open_small(self._source, name, 0)
            else:
                original = untrusted_files.open_weights(self._source / name, 0)
            with original as source, part.open("wb", buffering=0) as copy:
                found = os.fstat(source.fileno())  # before copying: the next start then notices a change meanwhile
                self._all(source.fileno(), copy.fileno())
                os.fsync(copy.fileno())  # or a crash could leave the name without the contents
            if not self._failed:
                part.replace(self._target / name)
                with self._lock:
                    self._copies[name] = _identity(found)
                    self._note()
        except OSError as error:
            self._failed = True
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(self._into, f"{error.strerror} while {name} was copied") from None
            raise FatalError(f"--stage {self._into}: {name} cannot be copied: {error.strerror}", USAGE) from None
        finally:
            part.unlink(missing_ok=True)

    def _note(self) -> None:
        part = self._target / (NOTE + PART)
        part.write_text(json.dumps(self._copies), encoding="utf-8")
        part.replace(self._target / NOTE)

    def _all(self, source: int, copy: int) -> None:
        buffer = memoryview(bytearray(CHUNK))
        while not self._failed and (got := os.readv(source, [buffer])):
            written = 0
            while written < got:
                written += os.write(copy, buffer[written:got])
            with self._lock:
                self._done += got
