"""Python and its packages, compared with what setup.cfg asks for, and the same on all ranks."""

from __future__ import annotations

import configparser
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from .check import FAIL, OK, WARN, Check
from .facts import Facts

SETUP = Path(__file__).resolve().parents[3] / "setup.cfg"
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+?)\s*>=\s*([0-9.]+)")


def requirements() -> tuple[str, dict[str, str]]:
    """The oldest Python, and the oldest version of each package; from setup.cfg, or what pip kept of it."""
    if SETUP.is_file():
        config = configparser.ConfigParser()
        config.read(SETUP, encoding="utf-8")
        python = config["options"]["python_requires"]
        lines = config["options"]["install_requires"].splitlines()
    else:
        about = metadata.metadata("phalanx")
        python = about["Requires-Python"] or ">=3.11"
        lines = [line for line in metadata.requires("phalanx") or [] if ";" not in line]
    found = [REQUIREMENT.match(line.strip()) for line in lines]
    return python.removeprefix(">="), {one[1]: one[2] for one in found if one}


def number(version: str) -> tuple[int, ...]:
    """`2.11.0+cu130` as (2, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def python() -> Check:
    oldest, _ = requirements()
    here = platform.python_version()
    if number(here) < number(oldest):
        return Check("python", FAIL, f"Python {here}", f"{oldest} or newer is needed")
    return Check("python", OK, f"Python {here}")


def packages() -> Check:
    _, wanted = requirements()
    missing, old = [], []
    for name, oldest in wanted.items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if number(here) < number(oldest):
            old.append(f"{name} {here} (>={oldest})")
    if missing or old:
        words = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"too old: {', '.join(old)}"] * bool(old)
        return Check("packages", FAIL, "; ".join(words), "`make install`, or `pip install -U phalanx`")
    return Check("packages", OK, f"{len(wanted)} packages as setup.cfg asks for them")


def alike(facts: Sequence[Facts]) -> list[Check]:
    """Ranks of one version work together; others' results differ, or fail at the join."""
    first = facts[0]
    checks: list[Check] = []
    for other in (one for one in facts if one.local_rank == 0):
        names = [name for name in first.packages if other.packages.get(name) != first.packages[name]]
        if not names:
            continue
        words = [f"{name} {other.packages.get(name, 'missing')} (here {first.packages[name]})" for name in names]
        state = FAIL if "phalanx" in names else WARN
        checks.append(Check("versions", state, f"{other.host} has {', '.join(words)}", "install the same on all hosts"))
    return checks
