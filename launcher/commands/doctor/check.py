"""One line of the report."""

from __future__ import annotations

import msgspec

OK, WARN, FAIL = "OK", "WARN", "FAIL"


class Check(msgspec.Struct, frozen=True):
    name: str  # what was looked at
    state: str  # OK, WARN: it runs, but slower or less safely than it could, FAIL: it will not run
    text: str  # what was found
    advice: str = ""  # what to do about it; never empty unless OK

    def line(self) -> str:
        return f"{self.state:4}  {self.name:12} {self.text}" + (f"; {self.advice}" if self.advice else "")


def worst(checks: list[Check]) -> str:
    return next((state for state in (FAIL, WARN) if any(one.state == state for one in checks)), OK)


def gb(number: float) -> str:
    """Bytes as GB, 10^9, with three significant figures."""
    return f"{number / 1e9:.3g} GB"
