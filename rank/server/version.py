"""Which version of Phalanx this is."""

from __future__ import annotations

import functools


@functools.cache
def version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("phalanx")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
