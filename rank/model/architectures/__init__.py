"""One file per architecture, named after the `model_type` of config.json. Only `find` needs torch."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class ConfigKeys(NamedTuple):
    """The unusual keys of an architecture's config.json: the fields of its file's CONFIG."""

    names: dict[str, str] = {}  # keys under another name, "outer.inner" in an object → the usual one
    defaults: dict[str, Any] = {}  # keys that checkpoints leave out → what they then mean, as in transformers' classes
    text_type: str = ""  # of a multimodal model: its text model's type, where text_config does not say
    layer_parts: int = 1  # layers here for each of config.json's
    images_beside: bool = False  # images take tokens, but no positions of the text's
    # Layers of full attention have other rope parameters than the sliding ones. Where config.json has one set, it is
    # that of full attention; sliding layers have no scaling, and may have a base of their own.
    rope_per_layer_type: bool = False


def supported() -> list[str]:
    """The names of all architectures."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(model_type: str) -> ModuleType:
    """The module of a supported model type: its `Args` and its `Model`."""
    return importlib.import_module(f".{model_type}", __name__)


@functools.cache
def config_keys(model_type: str) -> ConfigKeys:
    """CONFIG of the architecture's file, a literal, as the file is read for it and not imported; else the defaults. Its
    `like` names the architecture whose keys it has but for its own."""
    file = Path(__file__).with_name(f"{model_type}.py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body if model_type in supported() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONFIG":
            own = ast.literal_eval(node.value)
            return config_keys(own.pop("like", ""))._replace(**own)
    return ConfigKeys()
