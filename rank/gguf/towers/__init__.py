"""One file per kind of mmproj file, named after `clip.projector_type`: towers that make features of images, as `Tower`
lists what they have."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from ....errors import MODEL, FatalError
from ..architectures import Architecture
from ..header import read
from ..metadata import MAX_LAYERS, Metadata

MAX_SIZE = 1 << 16  # no tower comes near


def spelled(projector: str) -> str:
    """The file's name: of qwen2.5vl_merger qwen2_5vl_merger."""
    return projector.replace(".", "_").replace("-", "_")


def supported() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


class Tower(NamedTuple):
    """The contents of a tower's file."""

    MODELS: dict[str, str]  # the text model's model_type → the whole one's
    config: Callable[[Metadata], dict[str, Any]]  # the keys of config.json that join the text model's
    TENSORS: dict[str, str] = {}  # the file's names → the tower's, as in rank/gguf/architectures
    tensors: Callable[[Metadata], dict[str, str]] = lambda m: {}  # in their place, where names depend on the file
    PAIRED: tuple[str, ...] = ()  # and these as in rank/gguf/architectures
    ADDED: float = 0.0
    UNCHANGED: tuple[str, ...] = ()
    TOKENS: dict[str, str] = {}  # keys of config.json that are numbers of tokens → the tokens' texts

    def architecture(self, m: Metadata) -> Architecture:
        """How a file's tensors are called and ordered."""
        return Architecture(
            self.tensors(m) or self.TENSORS, self.config, self.PAIRED, ADDED=self.ADDED, UNCHANGED=self.UNCHANGED
        )


def find(m: Metadata) -> Tower:
    """The tower of a mmproj file. Raises FatalError where its projector is not supported, or there is none."""
    kind = m.values.get("clip.projector_type") or m.values.get("clip.vision.projector_type")
    if m.architecture != "clip" or not isinstance(kind, str):
        raise FatalError(f"{m.file} is no mmproj file: its metadata have no clip.projector_type", MODEL)
    if spelled(kind) not in supported():
        raise FatalError(
            f"{m.file}: the projector {kind!r} is not supported; supported are {', '.join(supported())}", MODEL
        )
    found = vars(importlib.import_module(f".{spelled(kind)}", __name__))
    return Tower(**{name: found[name] for name in Tower._fields if name in found})


def config(m: Metadata, text: Metadata, keys: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model with the tower. m: of the mmproj file; text, keys: of the text model's, and what it
    means."""
    tower = find(m)
    kind = tower.MODELS.get(keys["model_type"])
    if kind is None:
        raise FatalError(f"{m.file} is for {', '.join(tower.MODELS)}, not for {keys['model_type']} models", MODEL)
    vision = tower.config(m)
    if (made := m.integer("vision.projection_dim", keys["hidden_size"])) != keys["hidden_size"]:
        raise FatalError(f"{m.file} makes features of {made} numbers, not of the model's {keys['hidden_size']}", MODEL)
    return {"model_type": kind, "text_config": keys} | _tokens(text, tower.TOKENS) | vision


def size(m: Metadata, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    """A size of the tower, which is at least 1. Raises FatalError."""
    key = f"vision.{key}"
    if not 1 <= (value := m.integer(key, default)) <= most:
        raise FatalError(f"{m.file}: the metadata's clip.{key} is {value}, expected 1 to {most}", MODEL)
    return value


def layers(m: Metadata) -> int:
    return size(m, "block_count", most=MAX_LAYERS)


def common(m: Metadata) -> dict[str, Any]:
    """How images become pixels, by the names of preprocessor_config.json."""
    return {"image_processor": m.given(image_mean="vision.image_mean", image_std="vision.image_std")}


def _tokens(text: Metadata, wanted: dict[str, str]) -> dict[str, int]:
    known = read(text.file, texts=True).metadata.get("tokenizer.ggml.tokens") or []
    return {key: known.index(token) for key, token in wanted.items() if token in known}
