"""Reads an option struct from the command line, the environment and a YAML file, and records where each value came
from.

The table of options is the struct itself (`rank/options.py`); this file only knows the sources and how to complain.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ...errors import USAGE, FatalError
from ...rank.options import Options, Spec, specs
from . import speculative_config
from .compat_flags import ARCHITECTURES, COMPAT_FLAGS, DIFFERENCES, OTHER_NAMES, CompatFlag, find

T = TypeVar("T", bound=msgspec.Struct)

TRUE, FALSE = ("1", "on", "true", "yes"), ("0", "off", "false", "no")
# Variables of the program itself, not options.
INTERNAL = (
    "PHALANX_JOB", "PHALANX_SERVER", "PHALANX_BATCH", "PHALANX_SUPERVISOR_REQUEST", "PHALANX_PARENT", "PHALANX_DOCTOR",
    "PHALANX_PROBE", "PHALANX_PREDECESSOR", "PHALANX_SERVICE",
)  # fmt: skip


class UsageError(FatalError):
    """A wrong option. `everywhere`: every rank of the job sees it, because all have this command line."""

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message, USAGE)
        self.everywhere = everywhere


class ParsedOptions(msgspec.Struct, Generic[T]):
    """The chosen options, and notes about them."""

    options: T
    origins: dict[str, str]
    notes: list[str]
    help: bool = False
    show_config: bool = False


class _Origin(msgspec.Struct, frozen=True):
    """The source of a value: `name` as the user wrote it, `place` for messages."""

    name: str
    place: str
    everywhere: bool = False

    def wrong(self, text: object, why: str) -> UsageError:
        return UsageError(f"{self.name} {text!r} ({self.place}): {why}", self.everywhere)


def _command_line(name: str) -> _Origin:
    return _Origin(name, "command line", everywhere=True)


def read(options: type[T], argv: Sequence[str], environ: Mapping[str, str], strict: bool = True) -> ParsedOptions[T]:
    """The struct filled from all sources: command line over environment over --config over default.

    With strict=False a value that only this host sees (environment, file) and that is wrong is passed over: rank 0's
    options win anyway, and rank 0 is the one that complains.
    """
    table = specs(options)
    line = _Line(table)
    line.read(argv)
    if line.help:
        return ParsedOptions(options(), {}, line.notes, help=True)
    config = line.config or environ.get("PHALANX_CONFIG", "")
    notes = line.notes + _stray_variables(table, environ)
    layers = [_environment_layer(table, environ), line.found]
    try:
        if config:
            layers.insert(0, _file_layer(table, config))
        values, origins = {}, dict.fromkeys(table, "default")
        for layer in layers:
            for name, (origin, text) in layer.items():
                values[name] = check(table[name], text, origin)
                origins[name] = f"{origin.place} ({origin.name})"
    except UsageError as error:
        if strict or error.everywhere:
            raise
        return ParsedOptions(options(), {}, notes)
    return ParsedOptions(options(**values), origins, notes, show_config=line.show_config)


class _Line:
    """Reads a command line; what it found is in its attributes."""

    def __init__(self, table: dict[str, Spec]):
        self._on = {one: spec for spec in table.values() for one in spec.flag.flags}
        self._off = {one: spec for spec in table.values() for one in spec.flag.off}
        self._short = {one: spec for spec in table.values() for one in spec.flag.short}
        for flags in (self._on, self._off):
            flags |= {other: flags[own] for other, own in OTHER_NAMES.items() if own in flags}
        self._places = [spec for spec in table.values() if spec.flag.positional]
        self.found: dict[str, tuple[_Origin, object]] = {}
        self.notes: list[str] = []
        self.help = self.show_config = False
        self.config = ""

    def read(self, argv: Sequence[str]) -> None:
        words, positionals = list(argv), []
        while words:
            word = words.pop(0)
            if word == "--":
                positionals += words
                break
            if word in ("-h", "--help"):
                self.help = True
            elif word.startswith("-") and word != "-":
                name, equals, value = word.partition("=")
                self._flag(name, value if equals else None, words)
            else:
                positionals.append(word)
        if not self.help:
            self._positionals(positionals)

    def _flag(self, name: str, value: str | None, words: list[str]) -> None:
        if name == "--show-config" and value is None:
            self.show_config = True
        elif name == "--config":
            self.config = self._value(name, value, words, "FILE")
        elif name in self._off:
            if value is not None:
                raise _command_line(name).wrong(value, "this flag takes no value")
            self.found[self._off[name].name] = (_command_line(name), False)
        elif name in self._short:
            if value is not None:
                raise _command_line(name).wrong(value, "this flag takes no value")
            spec = self._short[name]
            self.found[spec.name] = (_command_line(name), spec.flag.short[name])
        elif name in self._on:
            spec = self._on[name]
            if spec.type is bool:
                if value is None and words and words[0] in spec.flag.spellings:
                    value = words.pop(0)
                self.found[spec.name] = (_command_line(name), True if value is None else value)
            else:
                text: object = self._value(name, value, words, spec.flag.metavar or "VALUE")
                if spec.item is str and spec.name in self.found:  # given again: one more
                    text = [self.found[spec.name][1], text]
                self.found[spec.name] = (_command_line(name), text)
                if spec.flag.secret and text != "none":
                    self.notes.append(
                        f"{name}: every user of this machine can read it in the list of processes; "
                        + (f"give {name}-file FILE or {spec.env} in the environment"
                           if f"{name}-file" in self._on else f"give it as {spec.env} in the environment")
                    )  # fmt: skip
                if name in DIFFERENCES:
                    self.notes.append(f"{name} {DIFFERENCES[name]}")
        elif name in ("--speculative-config", "-sc") and self._places:
            text = self._value(name, value, words, "JSON")
            try:
                self.found |= {key: (_command_line(name), one) for key, one in speculative_config.options(text).items()}
            except ValueError as error:
                raise UsageError(f"{name} {text}: {error}", everywhere=True) from None
        elif self._places and (entry := find(name)) is not None:
            self._compat_flag(entry, name, entry.value(words) if value is None else value)
        else:
            raise UsageError(f"unknown option {name}{self._suggestion(name)}", everywhere=True)

    def _value(self, name: str, value: str | None, words: list[str], metavar: str) -> str:
        if value is not None:
            return value
        if not words or (words[0].startswith("--") and len(words[0]) > 2):
            raise UsageError(f"{name} needs a value: {name} {metavar}", everywhere=True)
        return words.pop(0)

    def _compat_flag(self, entry: CompatFlag, name: str, value: str | None) -> None:
        if entry.refuses(value):
            raise UsageError(f"{name}: {entry.text}", everywhere=True)
        given = name if value is None else f"{name} {value}"  # it may be a word that was not meant to be its value
        self.notes.append(f"{given} has no effect: {entry.text}")

    def _positionals(self, words: list[str]) -> None:
        for word in words:
            if not self._places:
                raise UsageError(f"unexpected argument {word!r}; --help shows what there is", everywhere=True)
            if free := next((spec for spec in self._places if spec.name not in self.found), None):
                self.found[free.name] = (_command_line(free.flag.metavar), word)
            elif word in ARCHITECTURES:
                self.notes.append(f"{word!r} is not needed: the architecture is read from the model's config.json")
            else:
                origin, known = self.found[self._places[-1].name]
                raise UsageError(
                    f"unexpected argument {word!r}: the model is given already ({known!r}); several values of an "
                    "option have commas between them",
                    everywhere=True,
                )

    def _suggestion(self, name: str) -> str:
        own = [*self._on, *self._off, *self._short, "--config", "--show-config", "--help"]
        bare = "--" + name.lstrip("-").replace("_", "-").lower()
        if bare in own:
            return f"; did you mean {bare}?"
        if any(bare in spec.flag.flags for spec in specs(Options).values()):
            return ": phalanx serve has it, but not this command; --help lists what this one has"
        longer = [one for one in own if one.startswith(bare) and len(bare) > 3]
        longer += [one for one in own if one == bare[:-1] and len(one) > 3]  # --tpp: too short for a likeness
        for one in longer[:1] or self._close(bare, own):
            return f"; did you mean {one}?"
        return "; --help lists the options"

    def _close(self, bare: str, own: list[str]) -> list[str]:
        """The flag of which this is a misspelling: word by word, or else --ctx-size would be taken for --block-size.
        It may be another server's, too: those get a clear error."""

        def alike(one: str, other: str) -> float:
            short, long = sorted((one, other), key=len)
            return (
                1.0 if len(short) > 2 and long.startswith(short) else difflib.SequenceMatcher(None, one, other).ratio()
            )

        def likeness(one: str) -> tuple[float, bool]:
            pairs = zip(one[2:].split("-"), words, strict=True) if one.count("-") == bare.count("-") else [(one, "")]
            return min(alike(*pair) for pair in pairs), one in own

        words = bare[2:].split("-")
        known = [one for one in ([*own, *COMPAT_FLAGS] if self._places else own) if one.startswith("--")]
        best = max(known, key=likeness)
        return [best] if len(bare) > 5 and likeness(best)[0] >= 0.75 else []


def _environment_layer(table: dict[str, Spec], environ: Mapping[str, str]) -> dict[str, tuple[_Origin, object]]:
    return {
        spec.name: (_Origin(name, "environment"), environ[name])
        for spec in table.values()
        for name in (spec.flag.variable, spec.env)
        if name and environ.get(name)  # an empty variable is an unset one
    }


def _stray_variables(table: dict[str, Spec], environ: Mapping[str, str]) -> list[str]:
    known = [spec.env for spec in (*table.values(), *specs(Options).values())] + ["PHALANX_CONFIG"]
    notes = []
    for name in environ:
        if name.startswith("PHALANX_") and name not in known and name not in INTERNAL:
            close = difflib.get_close_matches(name, known, 1, 0.86)
            if close:
                notes.append(f"the environment variable {name} is no option; did you mean {close[0]}?")
    return notes


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The value that a YAML file holds. Raises OSError, and ValueError with its fault."""
    import yaml  # here: only a command that is given such a file pays for it

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except RecursionError:
        raise ValueError("not YAML: it is nested too deeply") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def _file_layer(table: dict[str, Spec], path: str) -> dict[str, tuple[_Origin, object]]:
    try:
        content = read_yaml(path)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--config {path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: lines such as `port: 2000` are expected, not a {type(content).__name__}")
    return _named_layer(table, content, path, f"--config {path}: unknown key")


def _named_layer(
    table: dict[str, Spec], content: Mapping[str, object], place: str, unknown: str
) -> dict[str, tuple[_Origin, object]]:
    """Values by field or flag name, with - or _."""
    names = _names(table)
    short = {one.lstrip("-"): (spec, kept) for spec in table.values() for one, kept in spec.flag.short.items()}
    layer: dict[str, tuple[_Origin, object]] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name in short:
            spec, kept = short[name]
            if _boolean(str(value), _Origin(str(key), place)):
                layer[spec.name] = (_Origin(str(key), place), kept)
            continue
        if name not in names and name in _names(specs(Options)):
            continue  # one file may serve several verbs
        if (entry := find(f"--{name}")) is not None and name not in names:
            raise UsageError(f"{unknown} {key!r}: {entry.text}{'' if entry.refused else '; leave it out'}")
        if name not in names:
            close = difflib.get_close_matches(name, names, 1, 0.7)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{unknown} {key!r}{hint}")
        layer[names[name].name] = (_Origin(str(key), place), value)
    return layer


def _names(table: dict[str, Spec]) -> dict[str, Spec]:
    """Every spelling of every option, without dashes in front."""
    names = {
        one.lstrip("-"): spec for spec in table.values() for one in (*spec.flag.flags, spec.name.replace("_", "-"))
    }
    others = {other[2:]: own[2:] for other, own in OTHER_NAMES.items() if other.startswith("--")}
    return names | {other: names[own] for other, own in others.items() if own in names}


def from_keywords(options: type[T], keywords: Mapping[str, object], environ: Mapping[str, str], caller: str) -> T:
    """The struct from a function's keyword arguments, over the environment, over the defaults."""
    table = specs(options)
    layers = [
        _environment_layer(table, environ),
        _named_layer(table, keywords, f"argument of {caller}", f"{caller} has no argument"),
    ]
    return options(
        **{name: check(table[name], text, origin) for layer in layers for name, (origin, text) in layer.items()}
    )


def overridden(options: T, keywords: Mapping[str, object], place: str) -> T:
    """The struct with other values, by field or flag name. Raises UsageError."""
    layer = _named_layer(specs(type(options)), keywords, place, "unknown option")
    table = specs(type(options))
    return msgspec.structs.replace(
        options, **{name: check(table[name], text, origin) for name, (origin, text) in layer.items()}
    )


def check(spec: Spec, value: Any, origin: _Origin) -> object:
    """`value`, a text or what YAML made of it, as the option's type and within its limits."""
    if spec.optional and value is None:
        return None
    if isinstance(value, (dict, type(None))) or (isinstance(value, (list, tuple)) and spec.type is not tuple):
        raise origin.wrong(value, "one value is needed")
    if spec.item is str:
        return tuple(dict.fromkeys(_texts(value)))
    if isinstance(value, (list, tuple)):
        value = ",".join(str(one) for one in value)
    text = str(value).strip()
    if spec.type is bool:
        return _boolean(spec.flag.spellings.get(text, text), origin)
    if spec.type is tuple:
        numbers = tuple(_number(spec, int, one, origin, text) for one in text.split(",")) if text else ()
        if len(set(numbers)) < len(numbers):
            raise origin.wrong(text, "a device is listed twice")
        return numbers
    if spec.type in (int, float):
        return _number(spec, spec.type, text, origin)
    if any("\ud800" <= one <= "\udfff" for one in text):  # bytes that Python could not read
        raise origin.wrong(text, "text in UTF-8 is needed, of names too")
    if spec.flag.choices:
        text = spec.flag.spellings.get(text, text)
        if text not in spec.flag.choices:
            raise origin.wrong(value, f"one of {', '.join(spec.flag.choices)} is needed{_hint(spec, text)}")
    return text


def _texts(value: object) -> list[str]:
    """The parts of a list: with commas between, in JSON, or of several such."""
    if isinstance(value, (list, tuple)):
        return [text for one in value for text in _texts(one)]
    text = str(value).strip()
    if text.startswith("["):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text, type=list[str])
    return [part.strip() for part in text.split(",") if part.strip()]


def _hint(spec: Spec, text: str) -> str:
    index = re.sub(r"cuda:?(?=\d)", "", text, flags=re.IGNORECASE)
    if spec.name == "device" and all(part.isdigit() for part in index.split(",")):
        return f"; GPUs are chosen by --d {index}"
    if spec.name == "kv_cache_dtype" and "e5m2" in text:
        return "; fp8 is e4m3, which has a bit more of each number and a scale for its range"
    return ""


def _boolean(text: str, origin: _Origin) -> bool:
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise origin.wrong(text, "on or off is needed")


def _number(spec: Spec, kind: type, text: str, origin: _Origin, whole: str = "") -> int | float:
    """`whole` is what the user wrote, where `text` is a part of it."""
    whole = whole or text
    try:
        number = kind(text)
    except ValueError:
        needed = "a whole number" if kind is int else "a number"
        if spec.type is tuple:
            needed = "a list of whole numbers such as 0,1,2,3"
        raise origin.wrong(whole, f"{needed} is needed") from None
    low, high = spec.flag.low, spec.flag.high
    if number != number or (low is not None and number < low):
        raise origin.wrong(whole, f"must be at least {low:g}" if low is not None else "a number is needed")
    if high is not None and number > high:
        raise origin.wrong(whole, f"must be at most {str(high).removesuffix('.0')}")
    return number
