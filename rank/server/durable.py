"""Files that are on the disk before they are reported. All of it waits for the disk: it is called in a thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


def sync_directory(path: str) -> None:
    """Have the names in a file's directory on the disk."""
    with contextlib.suppress(OSError):
        fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def atomically(path: str, writer: str = "", mode: int = 0o666) -> Iterator[Any]:
    """A file that appears at `path` whole, or not at all. writer: where several may write the same file at once, this
    one's name; the last of them wins."""
    part = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}{writer}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_directory(path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
