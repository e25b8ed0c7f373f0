"""Checkpoints in safetensors files, single or sharded: what they hold, and reading the slices that a rank asks for.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian, the header as
JSON, then the tensors, whose `data_offsets` count from the header's end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...exits import MODEL, Stop
from .slicing import Slice

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as a file's header describes it; its bytes are those from `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Listing(msgspec.Struct):
    """All headers of a checkpoint, in a form that one rank can send to the others."""

    files: dict[str, str]  # tensor → the file that should hold it
    headers: dict[str, dict[str, Entry]]  # file → its tensors


class Checkpoint:
    """The tensors of a model directory. `names` maps each, as the model spells it, to its own name."""

    def __init__(self, path: Path, listing: Listing, rename: Callable[[str], str] = lambda name: name):
        self.path = path
        self.listing = listing
        self.names = {rename(name): name for name in listing.files}
        self._open: dict[str, Any] = {}

    def find(self, wanted: str) -> tuple[str, Entry]:
        """A tensor, as the model spells it: its file and what the header says. Raises Stop where it is not there."""
        if wanted not in self.names:
            raise Stop(f"{self.path} has no tensor {wanted}", MODEL)
        name = self.names[wanted]
        file = self.listing.files[name]
        entry = self.listing.headers[file].get(name)
        if entry is None:
            raise Stop(f"{self.path / file} has no tensor {name}, which {INDEX} says is there", MODEL)
        return file, entry

    def check(self, part: Slice) -> None:
        """Raises Stop unless the slice's tensor is there, of the expected shape and a readable dtype."""
        file, entry = self.find(part.tensor)
        name = self.names[part.tensor]
        if entry.shape != part.shape:
            expected = " x ".join(map(str, part.shape))
            raise Stop(f"{self.path / file}: {name} is {' x '.join(map(str, entry.shape))}, expected {expected}", MODEL)
        if entry.dtype not in DTYPES:
            supported = ", ".join(DTYPES)
            raise Stop(f"{self.path / file}: {name} has dtype {entry.dtype}; supported are {supported}", MODEL)

    def fill(self, part: Slice) -> None:
        """Copy the slice into its target, converting to the target's dtype on its device. The file is mapped."""
        if part.target.numel() == 0:  # a rank whose share of the axis is padding alone
            return
        file, _ = self.find(part.tensor)
        name = self.names[part.tensor]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, framework="pt")
            tensor = self._open[file].get_slice(name)
            data: Tensor = tensor[tuple(slice(start, stop) for start, stop in part.ranges)]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise Stop(f"{self.path / file}: {name} cannot be read: {error}", MODEL) from None
        part.target.copy_(data)


def weight_files(path: Path) -> dict[str, str]:
    """Which file holds each tensor by the index, or the single file under the name "" where there is no index.

    Raises Stop where there are no weights or the index is garbled.
    """
    index = path / INDEX
    if index.exists():
        return _read_index(index)
    if (path / SINGLE).exists():
        return {"": SINGLE}
    other = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f"; {other[0]} is of a kind that cannot be read yet" if other else ""
    raise Stop(f"{path} has neither {SINGLE} nor {INDEX}{hint}", MODEL)


def read_listing(path: Path) -> Listing:
    """The headers of all weight files. Raises Stop in words for the user where one is missing, damaged or cut off."""
    files = weight_files(path)
    found = list(dict.fromkeys(files.values()))
    for file in found:
        if not (path / file).exists():
            raise Stop(f"{path}: {INDEX} names {file}, which is missing", MODEL)
    headers = {file: read_header(path / file) for file in found}
    if "" in files:
        files = dict.fromkeys(headers[SINGLE], SINGLE)
    return Listing(files, headers)


def read_header(file: Path) -> dict[str, Entry]:
    """A file's tensors. Raises Stop where it is no safetensors file, or longer or shorter than its header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"a header of {length} bytes does not fit into a file of {size}")
            header = json.loads(opened.read(length))
        begin = 8 + length
        header.pop("__metadata__", None)
        entries = {name: _entry(name, said, begin) for name, said in header.items()}
        end = max((entry.stop for entry in entries.values()), default=begin)
        if end != size:
            raise ValueError(f"its header tells of {end} bytes, the file has {size}")
    except OSError as error:
        raise Stop(f"{file} cannot be read: {error.strerror}", MODEL) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Stop(f"{file} is damaged or truncated: {_reason(file, error)}", MODEL) from None
    return entries


def _entry(name: str, said: dict[str, Any], begin: int) -> Entry:
    """One tensor of a header; ValueError where its bytes are not what its shape needs."""
    start, stop = said["data_offsets"]
    entry = Entry(said["dtype"], tuple(said["shape"]), begin + start, begin + stop)
    elements = 1
    for size in entry.shape:
        elements *= size
    kind = DTYPES.get(entry.dtype)
    if stop < start or start < 0 or (kind is not None and elements * kind.itemsize != stop - start):
        raise ValueError(f"{stop - start} bytes for {name}, {entry.dtype} of shape {list(entry.shape)}")
    return entry


def _reason(file: Path, error: Exception) -> str:
    with file.open("rb") as opened:
        if opened.read(24) == b"version https://git-lfs.":
            return "it is a Git LFS pointer; fetch the real file with `git lfs pull`"
    return str(error) if isinstance(error, ValueError) else f"its header lacks something ({error!r})"


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Stop(f"{index} is garbled: {type(error).__name__}: {error}", MODEL) from None
