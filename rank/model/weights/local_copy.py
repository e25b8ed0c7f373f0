"""Copies of a model on the node's own disk or memory, which the ranks of a node, and later jobs, read instead.

Whoever holds the lock copies, the other ranks of the node wait for it and find all done: nobody has to know who is on
which node. A file gets its name when it is whole, so that an interrupted job leaves nothing that looks complete. What
each is a copy of is noted beside them: not every file system keeps a time of change as another one has it.
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
from ...safetensors_header import INDEX, weight_files

CHUNK = 16 << 20  # bytes of one read
COPIES = 4  # files at once: network file systems are faster for several readers
LOOK = 0.2  # seconds between words about progress
LOCK, NOTE, PART = ".lock", ".copies", ".part"

Identity = list[int]  # of a file: its size and its time of change in nanoseconds


def make_local_copy(
    source: Path, into: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Path, int]:
    """The copy of the model directory `source` below `into`, and how many bytes were copied for it by this call.

    A file that has not changed since it was copied is not copied again. Raises Stop in words for the user.
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
            return target, _bring(source, target, into, progress)
    except OSError as error:
        raise FatalError(f"--stage {into}: {error.filename or target}: {error.strerror}", USAGE) from None


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Waits without spinning; the kernel frees the lock of a process that dies."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _names(source: Path) -> list[str]:
    """The files that ranks read."""
    weights = dict.fromkeys(weight_files(source).values())
    for name in weights:
        if os.path.basename(name) != name:  # it could be written outside the copy
            raise FatalError(
                f"{source}: {name}, which the index names, is in another directory: it cannot be staged", USAGE
            )
    return ["config.json", *(n for n in ("generation_config.json", INDEX) if (source / n).exists()), *weights]


def _bring(source: Path, target: Path, into: Path, progress: Callable[[int, int], None]) -> int:
    names = _names(source)
    copies = _noted(target)
    there = {name for name in names if _is_copy(source / name, target / name, copies.get(name))}
    missing = [name for name in names if name not in there]
    for file in target.iterdir():
        if file.name not in (LOCK, NOTE, *there):
            file.unlink()  # of an interrupted copy, or of what the model was before
    total = sum((source / name).stat().st_size for name in missing)
    free = shutil.disk_usage(target).free
    if total > free:
        raise _no_space(into, f"{total / 1e9:.2f} GB are to be copied, {free / 1e9:.2f} GB are free")
    if missing:
        _Copy(source, target, into, {name: copies[name] for name in there}).run(missing, total, progress)
    return total


def _identity(found: os.stat_result) -> Identity:
    return [found.st_size, found.st_mtime_ns]


def _noted(target: Path) -> dict[str, Identity]:
    """What the files here are copies of; of files that are not there any more, too."""
    try:
        return dict(json.loads((target / NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none yet, or cut off with the machine's power
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
    """`copies` is what is there already."""

    def __init__(self, source: Path, target: Path, into: Path, copies: dict[str, Identity]):
        self._source, self._target, self._into = source, target, into
        self._copies = copies
        self._done = 0
        self._lock = threading.Lock()
        self._failed = False

    def run(self, names: list[str], total: int, progress: Callable[[int, int], None]) -> None:
        """Raises what the first failing copy raised, when all have ended."""
        progress(0, total)
        self._note()  # without those that are copied now
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
            with (self._source / name).open("rb", buffering=0) as source, part.open("wb", buffering=0) as copy:
                found = os.fstat(source.fileno())  # before: what changes meanwhile is seen at the next start
                self._all(source.fileno(), copy.fileno())
                os.fsync(copy.fileno())  # the name must not outlive a crash that the contents do not
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
