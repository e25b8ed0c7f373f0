"""Bytes of a checkpoint's weight files by their headers, compared with those that the model needs."""

from __future__ import annotations

from pathlib import Path

from ....rank.gguf import checkpoint
from ....rank.gguf.checkpoint import is_gguf
from ....rank.safetensors_header import INDEX, SINGLE, read_index, weight_files
from .shape import ModelShape, kind_of


def by_class(path: Path) -> dict[str, int]:
    """Bytes of the tensors by class; empty where there are no weight files, and of a GGUF file "" alone.

    Raises FatalError where a file is broken.
    """
    found: dict[str, int] = {}
    if is_gguf(path):
        return {
            "": sum(tensor.stop - tensor.start for one in checkpoint.headers(path) for tensor in one.tensors.values())
        }
    if not any((path / name).exists() for name in (INDEX, SINGLE)):
        return found
    if not any((path / name).exists() for name in weight_files(path).values()):
        return found  # the index came with config.json
    for tensors in read_index(path).headers.values():
        for name, entry in tensors.items():
            kind = kind_of(name)
            found[kind] = found.get(kind, 0) + entry.stop - entry.start
    return found


def compare(shape: ModelShape, classes: dict[str, int]) -> str:
    """Notes on the weight files' bytes compared with those that the model needs."""
    if not classes:
        return "from config.json alone: there are no weight files"
    if "" in classes:
        return f"the GGUF file holds {classes[''] / 1e9:.2f} GB of weights"
    held, wanted = sum(classes.values()), shape.checkpoint_bytes
    if abs(held - wanted) <= 0.01 * wanted:
        return f"the weight files hold {held / 1e9:.2f} GB, as the model needs"
    return (
        f"the weight files hold {held / 1e9:.2f} GB, the model needs {wanted / 1e9:.2f} GB: "
        "tensors that are not read, or a config.json that is not theirs"
    )
