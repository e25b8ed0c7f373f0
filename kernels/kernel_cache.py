"""The node's folder of compiled kernels. No torch: kernels may be compiled before that is installed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .. import errors


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """One process of the node at a time."""
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def atomic_write(file: Path, content: bytes) -> None:
    """Write all of it, or raise OSError: a rank that dies here, or a full disk, leaves no half file behind."""
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(content)
        part.rename(file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def cache_folder() -> Path:
    """This user's folder of compiled kernels on this node. Nobody else may write to it: what lies there is run."""
    folder = Path(tempfile.gettempdir()) / f"phalanx-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        reason = f"no folder {folder} can be made ({error.strerror}): set TMPDIR to one that this user may write to"
        raise errors.FatalError(reason, errors.USAGE) from None
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise errors.FatalError(f"{folder} is not this user's alone: remove it, or set TMPDIR", errors.USAGE)
    return folder
