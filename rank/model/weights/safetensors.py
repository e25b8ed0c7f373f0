"""Checkpoints in safetensors files, single or sharded: what they hold, and reading the slices that a rank asks for.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian, the header as
JSON, then the tensors, whose `data_offsets` count from the header's end.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...exits import MODEL, Stop
from .slicing import Slice

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
POPULATE_READ = 22  # madvise: fault pages in, and fail where reading them would raise SIGBUS; Linux 5.14

Ranges = tuple[tuple[int, int], ...]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as a file's header describes it; its bytes are those from `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return (self.stop - self.start) // max(1, rows(self.shape)[0])


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
        self._maps: dict[str, mmap.mmap] = {}

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
        file, entry = self.find(part.tensor)
        ranges = part.ranges if len(part.shape) > 1 else (*part.ranges, (0, 1))
        (first, last), width = ranges[0], entry.width
        try:
            mapped = self._map(file)
            _fetch(mapped, entry.start + first * width, entry.start + last * width)
        except OSError as error:
            raise Stop(f"{self.path / file}: {self.names[part.tensor]} cannot be read: {_why(error)}", MODEL) from None
        data = torch.frombuffer(mapped, dtype=torch.uint8)[entry.start : entry.stop]
        part.target.copy_(elements(window(data, entry, 0, ranges), entry).view(part.target.shape))

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            with (self.path / file).open("rb") as opened:
                # A private copy, which torch may see as writable; nothing is written, so nothing is copied.
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def _fetch(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Get bytes into memory before they are touched, where an error would end the process without a word.

    Whole rows: what a matrix that is cut by columns has between a rank's parts is read over, not skipped.
    """
    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > len(mapped):  # it became shorter after its header was read
        raise OSError(errno.EFAULT, "")
    # Through ctypes, which lets the watchdog's thread run meanwhile: mmap's own call keeps the interpreter's lock, for
    # minutes where a disk is slow.
    libc = ctypes.CDLL(None, use_errno=True)
    address = np.frombuffer(mapped, np.uint8).ctypes.data + begin
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(stop - begin), POPULATE_READ):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # an older kernel
            raise OSError(number, os.strerror(number))


def _why(error: OSError) -> str:
    if error.errno == errno.EFAULT:
        return "the file has become shorter, or its file system fails"
    return str(error.strerror)


def rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor as rows of at least one element: a vector has rows of one."""
    return tuple(shape) if len(shape) > 1 else (math.prod(shape), 1)


def window(data: Tensor, entry: Entry, first: int, ranges: Ranges) -> Tensor:
    """A view [rows, ..., bytes] of `ranges` of a tensor in bytes, which hold whole rows of it from `first` on."""
    size = DTYPES[entry.dtype].itemsize
    inner = rows(entry.shape)[1:]
    whole = data.view(-1, *inner[:-1], inner[-1] * size)
    (top, bottom), *middle, (left, right) = ranges
    cut = [(top - first, bottom - first), *middle, (left * size, right * size)]
    return whole[tuple(slice(start, stop) for start, stop in cut)]


def elements(data: Tensor, entry: Entry) -> Tensor:
    """Bytes [..., bytes] as what they are."""
    dtype = DTYPES[entry.dtype]
    if data.storage_offset() % dtype.itemsize:  # a header of odd length, which old files have
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)


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
