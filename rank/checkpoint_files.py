"""What a model's path holds, for all who read it: a directory with config.json and safetensors, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from . import safetensors_header
from .gguf import checkpoint
from .gguf.checkpoint import is_gguf
from .safetensors_header import Index


def directory(path: Path) -> Path:
    """Where the model's weight files are."""
    return path.parent if is_gguf(path) else path


def config_file(path: Path) -> Path:
    """The file that holds the model's config."""
    return path if is_gguf(path) else path / "config.json"


def config_bytes(path: Path) -> bytes:
    """What a model's config is known again by: config.json, or all of a GGUF file before its first tensor."""
    size = -1
    if is_gguf(path):
        size = min((tensor.start for tensor in checkpoint.headers(path)[0].tensors.values()), default=-1)
    with config_file(path).open("rb") as file:
        return file.read(size)


def weight_files(path: Path) -> list[str]:
    """Their names in the directory. Raises FatalError where there are none or an index is garbled."""
    if is_gguf(path):
        return [file.name for file in checkpoint.shards(path)]
    return list(dict.fromkeys(safetensors_header.weight_files(path).values()))


def read_index(path: Path) -> Index:
    """Which tensor lies where. Raises FatalError where a file is missing, damaged or cut off."""
    return checkpoint.read_index(path) if is_gguf(path) else safetensors_header.read_index(path)
