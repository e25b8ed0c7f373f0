"""How quantised checkpoints store weights: one file per `quant_method` of config.json's quantization_config.

A file has `match(settings, path, names)`: the `Format` of the linear at a path, or None where it is plain. It is equal
for linears that are stored alike. HARMLESS are the ends of names of tensors that are not needed. Only these files need
torch.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ....errors import MODEL, FatalError

STORED_BY = "bits", "group_size", "desc_act", "sym"  # settings that say how GPTQ's weights are stored
# Keys under which methods list the modules that they leave plain.
LEFT_OUT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
# Advice to the user about weights whose storage is not supported.
INSTEAD = "serve the model's unquantised weights instead, with --isq to quantise them while they are loaded"


def methods() -> list[str]:
    """The methods that have a file, in the spelling of config.json."""
    return sorted(one.name.replace("_", "-") for one in pkgutil.iter_modules(__path__) if one.name[0] != "_")


def method_of(settings: object, where: object = "config.json") -> str:
    """The method of a quantization_config. Raises FatalError where it has none, or one that is not supported.

    where: what the message begins with.
    """
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or str(method).replace("_", "-") not in methods():
        known = f"; supported are {', '.join(methods())}" if methods() else ""
        raise FatalError(f"{where}: quantised weights ({method}) are not supported{known}: {INSTEAD}", MODEL)
    is_marlin = settings.get("checkpoint_format") == "marlin" or settings.get("is_marlin_format") is True
    return "marlin" if method == "gptq" and is_marlin else str(method).replace("_", "-")


def goes_by(method: str) -> tuple[str, ...]:
    """The names that users may give a method: of GPTQ's codes in Marlin's order, and of the kernel that others take for
    GPTQ's own, both."""
    return ("gptq", "marlin") if method in ("gptq", "marlin") else (method,)


def find(settings: dict[str, Any]) -> Any:
    """The file of a quantization_config's method."""
    return importlib.import_module(f".{method_of(settings).replace('-', '_')}", __name__)


def choose(settings: dict[str, Any], plain: Callable[[str], Any], names: Collection[str] = ()) -> Callable[[str], Any]:
    """The format of each linear, by its path. plain: of a path, what makes parts of those that are not quantised.

    names: of the checkpoint's tensors; none where config.json alone is known.
    """
    left_out = [pattern for key in LEFT_OUT for pattern in settings.get(key) or ()] + _dynamic(settings)
    match = find(settings).match
    # `phalanx fit` asks for each linear again with each tensor degree, and of many experts that takes seconds.
    return functools.cache(
        lambda path: (None if is_among(path, left_out) else match(settings, path, names)) or plain(path)
    )


def _dynamic(settings: dict[str, Any]) -> list[str]:
    """The modules that GPTQModel's rules leave plain: patterns after `-:`. Others give modules their own settings."""
    found, rules = [], settings.get("dynamic") or {}
    if not isinstance(rules, dict):
        raise FatalError(f"config.json: quantization_config has dynamic {rules!r}, expected an object", MODEL)
    for rule, changes in rules.items():
        if rule.startswith("-:"):
            _compiled(rule[2:], rule)
            found.append(f"re:{rule[2:]}")
        elif not isinstance(changes or {}, dict):
            raise FatalError(
                f"config.json: quantization_config's dynamic gives {rule} {changes!r}, expected an object", MODEL
            )
        else:
            check_same(settings, changes or {}, f"dynamic gives modules like {rule}")
    return found


def check_same(settings: dict[str, Any], changes: dict[str, Any], where: str) -> None:
    """Raises FatalError where changes, which some modules have, store these otherwise than in settings. where: of
    quantization_config, and which modules."""
    if any(settings.get(key) != value for key, value in changes.items() if key in STORED_BY):
        raise FatalError(
            f"config.json: quantization_config's {where} other settings, {changes!r}, which is not supported: "
            f"{INSTEAD}",
            MODEL,
        )


def _compiled(pattern: str, rule: str) -> re.Pattern[str]:
    """rule: as config.json has it."""
    try:
        return re.compile(pattern)
    except re.error as wrong:
        raise FatalError(
            f"config.json: quantization_config has the rule {rule}, which is no regular expression: {wrong}", MODEL
        ) from None


def is_among(path: str, patterns: Iterable[str]) -> bool:
    """Whether a list names a module: itself or one that it is in, by the end of its path, where * is anything within a
    name, or `re:` and a pattern."""
    parts = path.split(".")
    for pattern in patterns:
        if pattern.startswith("re:"):
            if _compiled(pattern[3:], pattern).match(path):
                return True
            continue
        wanted = pattern.rstrip(".").split(".")
        while len(wanted) > 1 and wanted[0] in ("model", "language_model"):  # more of them in a multimodal model
            wanted = wanted[1:]
        for at in range(len(parts) - len(wanted) + 1):
            if all(map(fnmatch.fnmatchcase, parts[at:], wanted)):
                return True
    return False


def is_stored(path: str, field: str, names: Collection[str]) -> bool:
    """Whether a linear is stored with this field, not as a plain `weight`; where names are unknown, the head is not."""
    if not names:
        return path not in ("lm_head", "model.embed_tokens")
    return f"{path}.{field}" in names or f"{path}.weight" not in names
