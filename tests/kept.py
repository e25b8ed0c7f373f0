"""Compilers' output for tests, kept from one run to the next: the same sources give the same again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from .leftovers import USUAL

UNUSED = 30 * 24 * 3600.0  # seconds after which a file is removed that no run has asked for


@functools.cache
def folder() -> Path:
    """The user's own: a library that another has put there would be run."""
    path = USUAL / f"phalanx-tests-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    assert not path.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o022, f"{path}: remove it"
    for one in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # other workers sweep as well
            if one.stat().st_mtime < time.time() - UNUSED:
                one.unlink()
    return path


@functools.cache
def version(*command: str) -> str:
    """A compiler's words about itself."""
    return subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout


def kept(make: Callable[[Path], object], *inputs: str) -> Path:
    """The file that `make` writes to the path it is given, made once for the same inputs: sources, headers, flags, and
    the compiler's version. Nothing is kept where `make` raises."""
    path = folder() / hashlib.sha256("\0".join(inputs).encode()).hexdigest()
    if path.exists():
        os.utime(path)
        return path
    part = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}")
    try:
        make(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path
