"""Flags of candle-vLLM, vLLM, SGLang and llama.cpp that are no options here: compat_flags.toml, and who asks it.

A flag that means what an option means is another name of it. One that would change nothing is ignored with a note. One
that would change the answer, or asks for what there is not, is rejected with what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

SWITCH = re.compile(r"on|off|auto|true|false|-?[\d.]+", re.IGNORECASE)
NUMBER = re.compile(r"-?[\d.]+")


class CompatFlag(msgspec.Struct, frozen=True):
    """The answer to a flag. `takes`: "X", "[X]" or "N ..", as compat_flags.toml explains, or "" for no value.

    A rejected flag ends the start; but with the values in `harmless`, which ask for what there is, it is ignored.
    """

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


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """Flags with the same answer, each written with what it takes."""

    note: str
    ignored: list[str] = []
    rejected: list[str] = []
    unless: tuple[str, ...] = ()  # values with which a rejected one is ignored

    def answers(self) -> Iterator[tuple[str, CompatFlag]]:
        for flag in (*self.ignored, *self.rejected):
            name, _, takes = flag.partition(" ")
            yield name, CompatFlag(self.note, takes, flag in self.rejected, self.unless if takes else ())


class _File(msgspec.Struct, forbid_unknown_fields=True):
    architectures: list[str]
    names: dict[str, str]
    differences: dict[str, str]
    flags: list[_Entry]


_FILE = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_File)
ARCHITECTURES, OTHER_NAMES, DIFFERENCES = _FILE.architectures, _FILE.names, _FILE.differences
COMPAT_FLAGS = {name: answer for entry in _FILE.flags for name, answer in entry.answers()}
_FAMILIES = {name.removesuffix("*"): entry for name, entry in COMPAT_FLAGS.items() if name.endswith("*")}


def find(name: str) -> CompatFlag | None:
    """The entry of a flag, with - or _. vLLM also writes -O3, and --flag.key for a part of a JSON value."""
    if re.fullmatch(r"-O\d", name):
        return msgspec.structs.replace(COMPAT_FLAGS["-O"], takes="")
    name = name.partition(".")[0]
    if name.startswith("--"):
        name = name.replace("_", "-")
    if (entry := COMPAT_FLAGS.get(name)) is not None:
        return entry
    positive = COMPAT_FLAGS.get("--" + name.removeprefix("--no-"))
    if name.startswith("--no-") and positive is not None and positive.takes in ("", "[X]"):
        return CompatFlag("it is off anyway" if positive.refused else positive.text)
    return next((entry for begin, entry in _FAMILIES.items() if name.startswith(begin)), None)
