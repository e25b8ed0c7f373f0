"""FP8 as NVIDIA's Model Optimizer stores it: weight e4m3 [O, I] and weight_scale, one number."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from . import fp8, is_stored
from ._part import check_settings

HARMLESS = fp8.HARMLESS


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> fp8.Scheme | None:
    check_settings(settings, quant_algo=("FP8",))
    return fp8.Scheme("weight_scale", 0, 0) if is_stored(path, "weight_scale", names) else None
