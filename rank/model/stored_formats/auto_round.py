"""AutoRound (Cheng et al. 2023, arXiv 2309.05516), where it stores weights as AutoGPTQ, GPTQModel or AutoAWQ do.

extra_config has the modules that are stored otherwise; of these only plain ones are supported.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ....errors import MODEL, FatalError
from . import awq, check_same, gptq, is_among
from ._part import check_settings

ZEROS = {"checkpoint_format": "gptq_v2"}  # zero points are stored as they are
FORMATS: dict[str, tuple[Any, dict[str, str]]] = {
    "auto_round:auto_gptq": (gptq, {}),
    "auto_round:gptqmodel": (gptq, ZEROS),
    "auto_round": (gptq, ZEROS),
    "auto_round:auto_awq": (awq, {}),
}
PLAIN = 16  # bits of weights that are not quantised
HARMLESS = gptq.HARMLESS


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> gptq.Scheme | awq.Scheme | None:
    check_settings(settings, packing_format=tuple(FORMATS), data_type=(None, "int"))
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(one, dict) for one in extra.values()):
        raise FatalError(f"config.json: quantization_config has extra_config {extra!r}, expected objects", MODEL)
    for module, changes in extra.items():
        if (changes.get("bits") or 0) >= PLAIN:
            if is_among(path, [f"re:{module}" if module.startswith((".*", "^")) else module]):
                return None
        else:
            check_same(settings, changes, f"extra_config gives {module}")
    method, more = FORMATS[settings["packing_format"]]
    return method.match(settings | more, path, names)
