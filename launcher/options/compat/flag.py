"""What is said of a flag of another server that is no option here."""

from __future__ import annotations

import re

import msgspec

SWITCH = re.compile(r"on|off|auto|true|false|-?[\d.]+", re.IGNORECASE)
NUMBER = re.compile(r"-?[\d.]+")


class CompatFlag(msgspec.Struct, frozen=True):
    """A refused flag ends the start; but with the values in `harmless`, which ask for what there is, it is passed over
    as the others are. `takes`: what may follow it as a word of its own. "": nothing; "X": a value; "[X]": on, off, auto
    or a number, or nothing; "N ..": numbers."""

    text: str
    takes: str = ""
    refused: bool = False
    harmless: tuple[str, ...] = ()

    def refuses(self, value: str | None) -> bool:
        return self.refused and value not in self.harmless

    def value(self, words: list[str]) -> str | None:
        """Takes the flag's value out of the words that follow it."""
        if self.takes == "N ..":
            while words and NUMBER.fullmatch(words[0]):
                words.pop(0)
        mine = False
        if words and self.takes == "X":
            mine = not words[0].startswith("-") or NUMBER.fullmatch(words[0]) is not None
        elif words and self.takes == "[X]":
            mine = SWITCH.fullmatch(words[0]) is not None
        return words.pop(0) if mine else None


def note(text: str, flags: str) -> dict[str, CompatFlag]:
    """Flags that would change nothing: each with what it takes, and a comma or the end of a line after it."""
    return _entries(flags, CompatFlag(text))


def refuse(text: str, flags: str, harmless: str = "") -> dict[str, CompatFlag]:
    """Flags that would change the answer, or that ask for what there is not. harmless: values, with spaces between."""
    return _entries(flags, CompatFlag(text, refused=True, harmless=tuple(harmless.split())))


def _entries(flags: str, entry: CompatFlag) -> dict[str, CompatFlag]:
    parts = [part.strip().partition(" ") for part in re.split(r"[,\n]", flags) if part.strip()]
    plain = msgspec.structs.replace(entry, harmless=())
    return {name: msgspec.structs.replace(entry, takes=takes) if takes else plain for name, _, takes in parts}
