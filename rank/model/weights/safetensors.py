"""Checkpoints in safetensors files, single or sharded. Only the slices that a rank asks for are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...exits import MODEL, Stop
from .slicing import Slice

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint:
    """The tensors of a model directory: `names` maps each, as the model spells it, to its own name and its file."""

    def __init__(self, path: Path, rename: Callable[[str], str] = lambda name: name):
        self.path = path
        self._open: dict[str, Any] = {}
        index = path / INDEX
        if index.exists():
            files = _read_index(index)
            for file in dict.fromkeys(files.values()):
                if not (path / file).exists():
                    raise Stop(f"{path}: {INDEX} names {file}, which is missing", MODEL)
        elif (path / SINGLE).exists():
            files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            other = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
            hint = f"; {other[0]} is of a kind that cannot be read yet" if other else ""
            raise Stop(f"{path} has neither {SINGLE} nor {INDEX}{hint}", MODEL)
        self.names = {rename(name): (name, file) for name, file in files.items()}

    def check(self, part: Slice) -> None:
        """Raises Stop unless the slice's tensor is there, of the expected shape and a readable dtype."""
        tensor, name, file = self._slice(part.tensor)
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if shape != part.shape:
            expected = " x ".join(map(str, part.shape))
            raise Stop(f"{self.path / file}: {name} is {' x '.join(map(str, shape))}, expected {expected}", MODEL)
        if dtype not in DTYPES:
            raise Stop(f"{self.path / file}: {name} has dtype {dtype}; supported are {', '.join(DTYPES)}", MODEL)

    def fill(self, part: Slice) -> None:
        """Copy the slice into its target, converting to the target's dtype on its device."""
        if part.target.numel() == 0:  # a rank whose share of the axis is padding alone
            return
        tensor, name, file = self._slice(part.tensor)
        try:
            data: Tensor = tensor[tuple(slice(start, stop) for start, stop in part.ranges)]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise Stop(f"{self.path / file}: {name} cannot be read: {error}", MODEL) from None
        part.target.copy_(data)

    def _slice(self, wanted: str) -> tuple[Any, str, str]:
        if wanted not in self.names:
            raise Stop(f"{self.path} has no tensor {wanted}", MODEL)
        name, file = self.names[wanted]
        try:
            return self._file(file).get_slice(name), name, file
        except SafetensorError:
            raise Stop(f"{self.path / file} has no tensor {name}, which {INDEX} says is there", MODEL) from None

    def _file(self, file: str) -> Any:
        """Opened once; the file is mapped, not read."""
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                reason = _reason(self.path / file, error)
                raise Stop(f"{self.path / file} is damaged or truncated: {reason}", MODEL) from None
        return self._open[file]


def _reason(file: Path, error: Exception) -> str:
    with file.open("rb") as opened:
        if opened.read(24) == b"version https://git-lfs.":
            return "it is a Git LFS pointer; fetch the real file with `git lfs pull`"
    return str(error)


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Stop(f"{index} is garbled: {type(error).__name__}: {error}", MODEL) from None
