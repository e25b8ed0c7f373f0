"""Environment variables that hold keys. The launcher reads them; none of its children inherits them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from ...rank.options import specs

# Secret variables of options, and of huggingface_hub, which only the launcher uses.
NAMES = (*(spec.env for spec in specs().values() if spec.flag.secret), "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child."""
    return {name: value for name, value in environ.items() if name not in NAMES}


def forget() -> None:
    """Remove the keys from this process's environment, once they have been read, and from its /proc/self/environ.

    Removing a variable leaves its text where the kernel put it at the start, and a fork has that memory too.
    """
    present = {name.encode() for name in NAMES if name in os.environ}
    with contextlib.suppress(OSError):  # without /proc nobody else reads it there either
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[47]), int(fields[48])  # proc(5): env_start and env_end, the fields 50 and 51
        at = start
        for entry in ctypes.string_at(start, end - start).split(b"\0") if present and 0 < start < end else ():
            name, _, value = entry.partition(b"=")
            if name in present:
                ctypes.memset(at + len(name) + 1, ord("x"), len(value))
            at += len(entry) + 1
    for variable in NAMES:
        os.environ.pop(variable, None)
