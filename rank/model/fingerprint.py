"""Checks that all ranks see the same model files, after they have joined and before they load."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NoReturn

import msgspec

from ...comm.base import HostComm
from ...comm.broadcast import gather_bytes
from ...errors import MODEL, FatalError
from ..checkpoint_files import config_bytes, config_file, directory, is_gguf, weight_files

MISSING = -1  # the size of a file that is not there


class Fingerprint(msgspec.Struct, frozen=True):
    config: str = ""  # SHA-256 of config.json, or of a GGUF file's part before its tensors
    files: dict[str, int] = {}  # weight file → bytes
    problem: str = ""  # why there is no model here


def take(path: Path, weights: bool) -> Fingerprint:
    """The fingerprint of `path` on this rank's host. weights: whether to include the weight files."""
    gguf = is_gguf(path)
    if not (path.is_file() if gguf else path.is_dir()):
        return Fingerprint(problem=f"there is no model {'file' if gguf else 'directory'} {path}")
    try:
        config = _digest(path)
        names = weight_files(path) if weights or gguf else []
    except OSError as error:
        return Fingerprint(problem=f"{error.filename} cannot be read: {error.strerror}")
    except FatalError as stop:
        return Fingerprint(problem=str(stop))
    return Fingerprint(config, {name: _size(directory(path) / name) for name in names})


def _digest(path: Path) -> str:
    return hashlib.sha256(config_bytes(path)).hexdigest()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return MISSING


def check(world: HostComm, hosts: list[str], path: Path, weights: bool) -> None:
    """Raises FatalError on the first rank that sees another model than rank 0, or none. Collective over world.

    The other ranks then do not return: they wait for the end of the job, so the user gets one message.
    """
    texts = gather_bytes(world, msgspec.json.encode(take(path, weights)))
    prints = [msgspec.json.decode(text, type=Fingerprint) for text in texts]
    if prints[0].problem:
        _stop(world, 0, prints[0].problem)
    others = [rank for rank, one in enumerate(prints) if one != prints[0]]
    if others:
        count = len(others) - 1
        more = f" ({count} more {'rank differs' if count == 1 else 'ranks differ'})" if count else ""
        text = difference(path, prints[others[0]], prints[0], f"rank 0 on {hosts[0]}")
        _stop(world, others[0], f"{text}{more}; all nodes have to see the same model")


def difference(path: Path, mine: Fingerprint, first: Fingerprint, there: str) -> str:
    """The message for a rank whose fingerprint differs from the one of the rank `there`."""
    if mine.problem:
        return f"{mine.problem}, but {there} sees it"
    if mine.config != first.config:
        return f"{config_file(path)} differs from what {there} sees"
    name = next(n for n in first.files | mine.files if mine.files.get(n) != first.files.get(n))
    here, theirs = (one.files.get(name, MISSING) for one in (mine, first))
    return f"{directory(path) / name} {_bytes(here)} here; for {there} it {_bytes(theirs)}"


def _bytes(size: int) -> str:
    return "is missing" if size == MISSING else f"has {size} bytes"


def _stop(world: HostComm, speaker: int, text: str) -> NoReturn:
    if world.rank == speaker:
        raise FatalError(text, MODEL)
    world.barrier()  # never returns: the speaker ends the job
    raise AssertionError("the job went on without the rank that has to end it")
