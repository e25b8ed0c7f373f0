"""The user's input: lines with a history, and texts of several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from .... import errors
from ....rank.server import server_registry

MAX_LINES = 1000  # lines of history
MANY = '"""'  # begins and ends a text of several lines


class Prompt:
    """On a terminal with readline: arrows, search, and lines of earlier conversations."""

    def __init__(self) -> None:
        self._file: Path | None = None
        if not sys.stdin.isatty():
            return
        with contextlib.suppress(ImportError, OSError):
            import readline  # here: its import changes how input() behaves

            path = server_registry.directory().parent / "chat_history"
            server_registry.make_directory(path.parent)
            os.close(os.open(path, os.O_CREAT, 0o600))
            readline.read_history_file(path)
            readline.set_history_length(MAX_LINES)
            self._file = path

    def ask(self) -> str | None:
        """The next text; None at the end. Raises FatalError where it is no text."""
        line = _line("> ")
        if line is None:
            return None
        line = line.strip()
        if not line.startswith(MANY):
            return line
        lines = [line.removeprefix(MANY)]
        while not lines[-1].endswith(MANY) and (more := _line("… ")) is not None:
            lines.append(more)
        return "\n".join(lines).removesuffix(MANY).strip()

    def close(self) -> None:
        """Keep what was typed."""
        if self._file is not None:
            import readline

            with contextlib.suppress(OSError):
                readline.write_history_file(self._file)


def _line(sign: str) -> str | None:
    """A line of the input; None at its end."""
    try:
        line = input(sign if sys.stdin.isatty() else "")
        line.encode()  # in the C locale Python lets bytes through that are no characters
    except EOFError:
        return None
    except UnicodeError:
        raise errors.FatalError(f"the input is no text in {sys.stdin.encoding}", errors.USAGE) from None
    return line
