"""The files of a model's path: a directory with config.json and safetensors, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from . import safetensors_header, untrusted_files
from .gguf import checkpoint
from .gguf.checkpoint import is_gguf
from .safetensors_header import Index


def directory(path: Path) -> Path:
    """Places of the model's weight files."""
    return path.parent if is_gguf(path) else path


def config_file(path: Path) -> Path:
    """The file that holds the model's config."""
    return path if is_gguf(path) else path / "config.json"


def config_bytes(path: Path) -> bytes:
    """The bytes that identify a model's config: config.json, or all of a GGUF file before its first tensor."""
    if not is_gguf(path):
        return untrusted_files.read_bytes(path, "config.json")
    size = min((tensor.start for tensor in checkpoint.headers(path)[0].tensors.values()), default=-1)
    with untrusted_files.open_weights(path) as file:
        return file.read(size)


def weight_files(path: Path) -> list[str]:
    """Their names in the directory; of a mmproj file, which may lie elsewhere, its whole path.

    Raises FatalError where there are none or an index is garbled.
    """
    if is_gguf(path):
        tower = checkpoint.mmproj(path)
        return [file.name for file in checkpoint.shards(path)] + ([str(tower.absolute())] if tower else [])
    return list(dict.fromkeys(safetensors_header.weight_files(path).values()))


def read_index(path: Path) -> Index:
    """Which tensor lies where. Raises FatalError where a file is missing, damaged or cut off."""
    return checkpoint.read_index(path) if is_gguf(path) else safetensors_header.read_index(path)
