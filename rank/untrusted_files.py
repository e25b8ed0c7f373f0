"""Opens the files of a model, whose directory may come from anybody.

Each has to be a regular file: a FIFO would block for ever, and a device may do anything when it is opened. Small files
(config, tokenizer, templates, indexes) have to lie in the model's directory or, as a snapshot in the hub's cache links
to them, among the blobs of its repository: clients see parts of these files, so a chat_template.jinja that links to
/proc/self/environ would show them its target. Weights may be links to anywhere on a disk, as shared storage needs that;
their bytes reach no reader.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from . import json_decoding

LARGEST = 1 << 28  # bytes of a small file: tokenizers have up to 40 MB
KERNEL = ("/proc/", "/sys/")  # regular files by their type, but not on a disk


def open_weights(file: Path, buffering: int = -1) -> BinaryIO:
    """A weight file, to read. Raises OSError, also where it is no regular file."""
    return os.fdopen(weights_descriptor(file), "rb", buffering)


def weights_descriptor(file: Path) -> int:
    """A file descriptor of a weight file, as open_weights."""
    return _open(os.path.realpath(file), file)


def open_small(directory: Path, name: str, buffering: int = -1) -> BinaryIO:
    """A small file, to read. directory: the model's; name: may have slashes.

    Raises OSError, also where it is no regular file or lies elsewhere.
    """
    resolved, root = os.path.realpath(directory / name), Path(os.path.realpath(directory))
    places = [root]
    if root.parent.name == "snapshots":
        places.append(root.parent.parent / "blobs")  # not resolved: it may be a link itself
    if not any(Path(resolved).is_relative_to(place) for place in places):
        raise _refused(
            f"it leads to {resolved}, outside of the model's directory: put a copy there in place of the link",
            directory / name,
        )
    return os.fdopen(_open(resolved, directory / name), "rb", buffering)


def read_bytes(directory: Path, name: str) -> bytes:
    """All of a small file, as open_small. Raises OSError, also where it is too large."""
    with open_small(directory, name) as opened:
        data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise _refused(f"it is larger than {LARGEST >> 20} MiB, which no file of this kind is", directory / name)
    return data


def read_text(directory: Path, name: str) -> str:
    """Reads text like read_bytes, with \\n at line ends. Raises UnicodeDecodeError, a ValueError, if not UTF-8."""
    return read_bytes(directory, name).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Reads like read_bytes; raises ValueError, as decode_object does, where it is no object of JSON."""
    return json_decoding.decode_object(read_bytes(directory, name))


def _open(resolved: str, file: Path) -> int:
    """resolved: without links, so that none is followed that was not looked at. file: for messages."""
    found = os.stat(resolved, follow_symlinks=False)  # before opening, which some devices take for an order
    if not stat.S_ISREG(found.st_mode) or resolved.startswith(KERNEL):
        raise _refused(f"{_kind(found.st_mode)} and no regular file on a disk", file)
    # Not blocking: it may have become a FIFO meanwhile.
    fd = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _refused("it is no regular file", file)
        os.set_blocking(fd, True)  # some archives' file systems would else refuse to fetch what is on a tape
    except BaseException:
        os.close(fd)
        raise
    return fd


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory", stat.S_IFCHR: "a device",
             stat.S_IFBLK: "a device", stat.S_IFLNK: "a link to itself"}  # fmt: skip
    return f"it is {kinds.get(stat.S_IFMT(mode), 'a file of the kernel')}"


def _refused(why: str, file: Path) -> OSError:
    return OSError(errno.EPERM, why, str(file))
