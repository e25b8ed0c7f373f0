"""Writes a checkpoint's weights: safetensors files of limited size, and their index."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ..safetensors_header import INDEX, SINGLE

LARGEST = 4 << 30  # bytes of a file, but for a tensor that is larger


class Writer:
    """Files of a directory. Tensors are written as soon as they fill one."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._open: dict[str, Tensor] = {}
        self._size = 0
        self._written: list[list[str]] = []  # of each file
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._open and self._size + tensor.nbytes > LARGEST:
            self._write()
        self._open[name] = tensor.cpu().contiguous()
        self._size += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, and name the files by how many there are."""
        if self._open or not self._written:
            self._write()
        count = len(self._written)
        if count == 1:
            self._file(0).rename(self.directory / SINGLE)
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._written):
            name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._file(number).rename(self.directory / name)
            where |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(where.items()))}
        (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _file(self, number: int) -> Path:
        return self.directory / f"model-{number + 1:05}.safetensors"

    def _write(self) -> None:
        save_file(self._open, self._file(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._open))
        self._total += self._size
        self._open, self._size = {}, 0
