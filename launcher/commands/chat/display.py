"""How an answer looks in the terminal: as it comes, when it is whole, or as Markdown."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.live
    from rich.console import Console, RenderableType

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)
GAP = re.compile(r"\n\s*\n")


class Display(Protocol):
    def thought(self, text: str) -> None:
        """A delta of reasoning, or a line about a tool's call."""

    def text(self, text: str) -> None:
        """A delta of the answer."""

    def end(self) -> None:
        """All of it is there."""

    def note(self, text: str) -> None:
        """Figures about it, for a person only."""


class Plain:
    """Shows an answer as it comes. Reasoning is faint on a terminal, and the answer begins a line of its own."""

    _thinking = False

    def thought(self, text: str) -> None:
        self._thinking = True
        self._write(text, faint=True)

    def text(self, text: str) -> None:
        if self._thinking:
            self._write("\n")
            self._thinking = False
        self._write(text)

    def end(self) -> None:
        self._thinking = False
        self._write("\n")

    def note(self, text: str) -> None:
        if sys.stdout.isatty() and sys.stdin.isatty():
            self._write(f"{text}\n", faint=True)

    def _write(self, text: str, faint: bool = False) -> None:
        sys.stdout.write(f"\x1b[2m{text}\x1b[0m" if faint and _styled() else text)
        sys.stdout.flush()


class Whole(Plain):
    """Nothing before the end."""

    def __init__(self) -> None:
        self._held: list[tuple[str, bool]] = []

    def _write(self, text: str, faint: bool = False) -> None:
        self._held.append((text, faint))

    def end(self) -> None:
        self._thinking = False
        held, self._held = [*self._held, ("\n", False)], []
        for text, faint in held:
            super()._write(text, faint)

    def note(self, text: str) -> None:
        super().note(text)
        for held, faint in self._held:
            super()._write(held, faint)
        self._held = []


class Live:
    """Markdown. What is finished is printed once; only the block that still grows is drawn again and again."""

    def __init__(self, frequency: float, console: Console | None = None):
        from rich.console import Console  # here: only who asks for it pays for it

        self._console = console or Console()
        self._frequency = frequency
        self._kind, self._rest = "", ""
        self._live: rich.live.Live | None = None

    def thought(self, text: str) -> None:
        self._add("thought", text)

    def text(self, text: str) -> None:
        self._add("text", text)

    def _add(self, kind: str, text: str) -> None:
        if kind != self._kind:
            self.end()
            self._kind = kind
        self._rest += text
        done, self._rest = finished(self._rest)
        if done:
            self._draw("")
            self._console.print(self._made(done))
        self._draw(self._rest)

    def _made(self, text: str) -> RenderableType:
        from rich.markdown import Markdown
        from rich.text import Text

        return Text(text.strip("\n"), style="dim") if self._kind == "thought" else Markdown(text)

    def _draw(self, text: str) -> None:
        from rich.live import Live as RichLive

        if not text.strip():
            if self._live is not None:
                self._live.update("")
                self._live.stop()
                self._live = None
            return
        if self._live is None:
            self._live = RichLive(console=self._console, refresh_per_second=self._frequency, transient=True)
            self._live.start()
        self._live.update(self._made(text))

    def end(self) -> None:
        rest, self._rest = self._rest, ""
        self._draw("")
        if rest.strip():
            self._console.print(self._made(rest))

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False)


def _styled() -> bool:
    """Whether standard output is a terminal that takes styles, and its user does as well (no-color.org)."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def finished(text: str) -> tuple[str, str]:
    """The blocks that cannot change any more, and the rest."""
    for gap in reversed(list(GAP.finditer(text))):
        before, after = text[: gap.end()], text[gap.end() :]
        # The text behind an indented line or a list may still belong to it.
        if len(FENCE.findall(before)) % 2 == 0 and after and not re.match(r"\s|[-*+] |\d+[.)] ", after):
            return before, after
    return "", text
