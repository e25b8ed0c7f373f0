"""Reads slices of tensors from a checkpoint's safetensors files."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ....errors import MODEL, FatalError
from ...safetensors_header import INDEX, Entry, Index, rows
from .slicing import Slice

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # each is converted to any of them
DTYPES = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
POPULATE_READ = 22  # madvise: fault pages in, and fail where an access would raise SIGBUS; Linux 5.14

Ranges = tuple[tuple[int, int], ...]


class Checkpoint:
    """The tensors of a model directory. `names` maps the model's name of a tensor to the checkpoint's."""

    def __init__(
        self,
        path: Path,
        index: Index,
        rename: Callable[[str], str] = lambda name: name,
        spelled: Callable[[str], str] = lambda name: name,
    ):
        """rename: from the checkpoint's name to the model's; spelled: back, for a tensor that is missing."""
        self.path = path
        self.index = index
        self.spelled = spelled
        self.names = {rename(name): name for name in index.files}
        self._maps: dict[str, mmap.mmap] = {}

    def find(self, wanted: str) -> tuple[str, Entry]:
        """The file and header entry of a tensor, by the model's name. Raises FatalError where it is missing."""
        if wanted not in self.names:
            raise FatalError(f"{self.path} has no tensor {self.spelled(wanted)}", MODEL)
        name = self.names[wanted]
        file = self.index.files[name]
        entry = self.index.headers[file].get(name)
        if entry is None:
            raise FatalError(f"{self.path / file} has no tensor {name}, which {INDEX} says is there", MODEL)
        return file, entry

    def check(self, part: Slice) -> None:
        """Raises FatalError unless the slice's tensor is present, with the expected shape and a supported dtype."""
        file, entry = self.find(part.tensor)
        name = self.names[part.tensor]
        scalar = part.shape == (1,) and entry.shape == ()
        if entry.shape != part.shape and not scalar:
            expected = " x ".join(map(str, part.shape))
            raise FatalError(
                f"{self.path / file}: {name} is {' x '.join(map(str, entry.shape))}, expected {expected}", MODEL
            )
        wanted = part.spec.dtype
        kinds = FLOATS if wanted is None or wanted in FLOATS.values() else [k for k, v in DTYPES.items() if v == wanted]
        if entry.dtype not in kinds:
            supported = ", ".join(kinds)
            raise FatalError(f"{self.path / file}: {name} has dtype {entry.dtype}; supported are {supported}", MODEL)

    def fill(self, part: Slice, target: Tensor) -> None:
        """Copy the slice from the mapped file into `target`, in its dtype and on its device."""
        if target.numel() == 0:  # this rank's shard is padding alone
            return
        file, entry = self.find(part.tensor)
        ranges = part.ranges if len(part.shape) > 1 else (*part.ranges, (0, 1))
        (first, last), width = ranges[0], entry.width
        try:
            mapped = self._map(file)
            _fetch(mapped, entry.start + first * width, entry.start + last * width)
        except OSError as error:
            raise FatalError(
                f"{self.path / file}: {self.names[part.tensor]} cannot be read: {_why(error)}", MODEL
            ) from None
        data = torch.frombuffer(mapped, dtype=torch.uint8)[entry.start : entry.stop]
        target.copy_(elements(window(data, entry, 0, ranges), entry).view(target.shape))

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            with (self.path / file).open("rb") as opened:
                # Copy-on-write: torch needs a writable buffer. Nothing is written, so nothing is copied.
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def _fetch(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Read bytes of the file into memory ahead of the access, where an I/O error would kill the process by SIGBUS.

    It reads whole rows: of a matrix that is split by columns, the other ranks' columns are read as well.
    """
    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > len(mapped):  # it became shorter after its header was read
        raise OSError(errno.EFAULT, "")
    # Through ctypes, which releases the interpreter lock for the watchdog's thread. mmap's own call would hold it, for
    # minutes with a slow disk.
    libc = ctypes.CDLL(None, use_errno=True)
    address = np.frombuffer(mapped, np.uint8).ctypes.data + begin
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(stop - begin), POPULATE_READ):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # an older kernel, which does not know the advice
            raise OSError(number, os.strerror(number))


def _why(error: OSError) -> str:
    if error.errno == errno.EFAULT:
        return "the file has become shorter, or its file system fails"
    return str(error.strerror)


def window(data: Tensor, entry: Entry, first: int, ranges: Ranges) -> Tensor:
    """A view [rows, ..., bytes] of `ranges` of a tensor. data: the bytes of its rows from `first` on."""
    size = DTYPES[entry.dtype].itemsize
    inner = rows(entry.shape)[1:]
    whole = data.view(-1, *inner[:-1], inner[-1] * size)
    (top, bottom), *middle, (left, right) = ranges
    cut = [(top - first, bottom - first), *middle, (left * size, right * size)]
    return whole[tuple(slice(start, stop) for start, stop in cut)]


def elements(data: Tensor, entry: Entry) -> Tensor:
    """Bytes [..., bytes] as elements of the tensor's dtype."""
    dtype = DTYPES[entry.dtype]
    if data.storage_offset() % dtype.itemsize:  # the header has an odd length, as in old files
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)
