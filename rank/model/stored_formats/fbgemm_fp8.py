"""FP8 as Llama 3.1 405B has it: weight e4m3 [O, I] and weight_scale [O, 1]."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from . import fp8, is_stored

HARMLESS = (*fp8.HARMLESS, ".input_scale_ub")


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> fp8.Scheme | None:
    return fp8.Scheme("weight_scale", 1, 0) if is_stored(path, "weight_scale", names) else None
