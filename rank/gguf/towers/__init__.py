"""One file per kind of mmproj file, named after `clip.projector_type`: towers that make features of images.

Each has `config(m)`, which gives the keys of config.json that join the text model's, `TENSORS`, from the file's
names to the tower's, as in rank/gguf/architectures, and `MODELS`, from the text model's model_type to the whole one's.
It may have `tensors(m)` in place of `TENSORS` where names depend on the file, `PAIRED`, `ADDED` and `UNCHANGED` as in
rank/gguf/architectures, and `TOKENS`, keys of config.json that are numbers of tokens by the tokens' texts.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from ....errors import MODEL, FatalError
from ..header import read
from ..metadata import MAX_LAYERS, Metadata

MAX_SIZE = 1 << 16  # no tower comes near


def spelled(projector: str) -> str:
    """The file's name: of qwen2.5vl_merger qwen2_5vl_merger."""
    return projector.replace(".", "_").replace("-", "_")


def supported() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


class Tensors:
    """How a mmproj file's tensors are called and ordered, in the shape of a file of rank/gguf/architectures."""

    def __init__(self, tower: ModuleType, m: Metadata):
        self.TENSORS: dict[str, str] = tower.tensors(m) if hasattr(tower, "tensors") else tower.TENSORS
        self.PAIRED: tuple[str, ...] = getattr(tower, "PAIRED", ())
        self.ADDED, self.UNCHANGED = getattr(tower, "ADDED", 0.0), getattr(tower, "UNCHANGED", ())


def find(m: Metadata) -> ModuleType:
    """The module of a mmproj file. Raises FatalError where its projector is not supported, or there is none."""
    kind = m.values.get("clip.projector_type") or m.values.get("clip.vision.projector_type")
    if m.architecture != "clip" or not isinstance(kind, str):
        raise FatalError(f"{m.file} is no mmproj file: its metadata have no clip.projector_type", MODEL)
    if spelled(kind) not in supported():
        raise FatalError(
            f"{m.file}: the projector {kind!r} is not supported; supported are {', '.join(supported())}", MODEL
        )
    return importlib.import_module(f".{spelled(kind)}", __name__)


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
    return {"model_type": kind, "text_config": keys} | _tokens(text, getattr(tower, "TOKENS", {})) | vision


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
