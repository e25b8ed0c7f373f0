"""A server that loads its model is waited for, and the user sees how far it is."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from .... import errors
from ... import find_server

LOOK_EVERY = 0.5  # seconds


def wait_until_ready(server: find_server.FoundServer) -> None:
    """Returns at once for servers that tell nothing of the kind. Raises FatalError where it will not be ready."""
    bar: Any = None
    try:
        while (state := find_server.health(server)).get("status") in ("loading", "restarting"):
            progress = state.get("progress") or {}
            phase, total = progress.get("phase") or state["status"], progress.get("total") or 0
            if bar is None:
                if not sys.stderr.isatty():
                    print(f"phalanx: the server is {state['status']}; waiting", file=sys.stderr)
                bar = tqdm(
                    total=0, file=sys.stderr, leave=False, disable=None,
                    bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}",
                )  # fmt: skip
            bar.total, bar.n = total, progress.get("done") or 0
            bar.set_description_str(phase)
            time.sleep(LOOK_EVERY)
        if state.get("status") == "failed":
            raise errors.FatalError(
                f"the server has failed: {state.get('message') or 'its log says why'}", errors.ERROR
            )
    finally:
        if bar is not None:
            bar.close()
