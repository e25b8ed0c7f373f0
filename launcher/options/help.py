"""The output of `--help` and `--show-config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from ...rank.options import GROUPS, Options, Spec, specs
from .option_sources import ParsedOptions

WIDTH = 30


def options_help(options: type[msgspec.Struct], without: Sequence[str] = ()) -> str:
    """Every option but those named in `without` on one line, in groups."""
    lines: list[str] = []
    table = [spec for name, spec in specs(options).items() if name not in without]
    groups = [group for group in GROUPS if any(spec.flag.group == group for spec in table)]
    groups[:0] = list(dict.fromkeys(spec.flag.group for spec in table if spec.flag.group not in GROUPS))
    for group in groups:
        lines.append(f"\n{group}:")
        lines += [_line(spec) for spec in table if spec.flag.group == group]
    lines.append("\nOther:")
    lines.append(_columns("--config FILE", "read options from YAML: lines such as `port: 2000`"))
    lines.append(_columns("--show-config", "print every value and where it came from, then end"))
    if issubclass(options, Options):
        lines.append(_columns("--sbatch", "print a Slurm script that runs this, then end; --nodes N: on N nodes"))
    lines.append(_columns("-h, --help", "print this"))
    return "\n".join(lines)


def _line(spec: Spec) -> str:
    flag = spec.flag
    shown = flag.off[0] if spec.type is bool and spec.default is True else ", ".join(_shortest(flag.flags))
    # A metavar stands for choices that are too many for a line; docs/options.md lists them.
    what = flag.metavar or ("{" + ",".join(flag.choices) + "}" if flag.choices else "")
    text = flag.help
    if spec.type is not bool and spec.default not in (None, "", 0, (), False, "auto"):
        text += f" ({spec.default:g})" if isinstance(spec.default, float) else f" ({spec.default})"
    return _columns(f"{shown} {what}".rstrip(), text)


def _shortest(flags: tuple[str, ...]) -> list[str]:
    """The first flag and the shortest, which are candle-vLLM's names; every other spelling is understood too."""
    return list(dict.fromkeys((flags[0], min(flags, key=len))))


def _columns(left: str, right: str) -> str:
    return f"  {left:{WIDTH}} {right}" if len(left) <= WIDTH else f"  {left}\n  {'':{WIDTH}} {right}"


def shown(chosen: ParsedOptions[Any], usage: str) -> bool:
    """Whether help or the configuration was asked for, which is printed then instead of running."""
    if chosen.help:
        print(usage + options_help(type(chosen.options)))
    elif chosen.show_config:
        print(show_config(chosen))
    return chosen.help or chosen.show_config


def show_config(chosen: ParsedOptions[Any], in_force: Mapping[str, object] = MappingProxyType({})) -> str:
    """Every value with its origin, in the order of the options; `in_force` has those that are not what was chosen."""
    rows = []
    options: type[msgspec.Struct] = type(chosen.options)
    for name, spec in specs(options).items():
        value = getattr(chosen.options, name)
        text = "(hidden)" if spec.flag.secret and value else _text(value)
        if in_force.get(name, value) != value:
            text += f" → {_text(in_force[name])}"
        rows.append((name, text, chosen.origins[name]))
    width = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return "\n".join(f"{name:{width[0]}}  {text:{width[1]}}  {origin}" for name, text, origin in rows)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(one) for one in value) or "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value in ("", None) else str(value)
