"""Leftovers of tests: processes, temporary files, shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .processes import SHARED, kill, remove, table
from .ranks import MEMORY

MARK = "TESTS_OF_PHALANX"  # in the environment of all that tests start, however it is detached
KERNELS = f"phalanx-kernels-{os.getuid()}"
# Open MPI 4 has one folder for all jobs of a user on a host, which stays when an mpirun is killed.
OPEN_MPI_4 = f"ompi.{socket.gethostname().partition('.')[0]}.{os.getuid()}"
USUAL = Path(tempfile.gettempdir())  # before own_tmpdir()
SHARED_BY_ALL = (KERNELS, "torchinductor_", OPEN_MPI_4)


def marked(word: str, parts: bool = False) -> dict[int, str]:
    """The processes that have this word as MARK, with their command lines; this process left out. parts: or the word
    with more behind a colon."""
    wanted, found = f"{MARK}={word}".encode(), {}
    for pid, process in table().items():
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if parts:
                entries = [entry.partition(b":")[0] for entry in entries]
            if pid != os.getpid() and wanted in entries:
                found[pid] = process.line
    return found


class Leftovers:
    """Leftovers since this was made: files, and processes with `word` as their MARK."""

    def __init__(self, word: str):
        self._word, self._before = word, self._all()

    def _all(self) -> set[Path]:
        places = (Path(os.environ["TMPDIR"]), Path(os.environ[MEMORY]))
        return {path for place in places for path in place.iterdir() if not path.name.startswith(SHARED_BY_ALL)}

    def seen(self) -> list[str]:
        return [*marked(self._word).values(), *sorted(map(str, self._all() - self._before))]

    def clear(self) -> None:
        """So that nobody else is blamed for them."""
        kill(marked(self._word))
        for path in self._all() - self._before:
            remove(path)


def hand_on_kernels(source: Path, target: Path) -> None:
    """Spare those who have `target` as TMPDIR the ten seconds and more in which kernels are compiled.

    Another process may compile meanwhile: its temporary folders are left out, and its parts of files may be gone.
    """

    def link(one: str, other: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.link(one, part := f"{other}.{os.getpid()}")
            os.replace(part, other)
            Path(part).unlink(missing_ok=True)  # it stays where both are the same file

    ignored = shutil.ignore_patterns("tmp*")
    with contextlib.suppress(FileNotFoundError):
        shutil.copytree(source / KERNELS, target / KERNELS, ignore=ignored, copy_function=link, dirs_exist_ok=True)


@contextlib.contextmanager
def own_tmpdir() -> Iterator[None]:
    """A TMPDIR for all that is started, and a place for Open MPI's shared memory: what others do in the usual ones is
    not mistaken for what tests do.
    """
    place = Path(tempfile.mkdtemp(prefix="t-"))  # short, as unix sockets' paths have to be
    memory = Path(tempfile.mkdtemp(prefix="t-", dir=SHARED))
    hand_on_kernels(USUAL, place)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(place))
            patch.setattr(tempfile, "tempdir", str(place))
            patch.setenv(MEMORY, str(memory))
            yield
        hand_on_kernels(place, USUAL)
    finally:
        shutil.rmtree(place)
        shutil.rmtree(memory)
