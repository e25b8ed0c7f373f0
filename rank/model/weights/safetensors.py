"""Reads slices of tensors from a checkpoint's safetensors or GGUF files."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ....errors import MODEL, FatalError
from ... import untrusted_files
from ...checkpoint_files import directory
from ...gguf import checkpoint
from ...safetensors_header import INDEX, Entry, Index, Order, rows
from . import ggml
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
    """The tensors of a model directory, or of a GGUF file. `names`: from the model's name of a tensor to theirs."""

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
        self.directory = directory(path)
        self.spelled = spelled
        self.names = {rename(name): name for name in index.files}
        self._maps: dict[str, mmap.mmap] = {}

    def find(self, wanted: str) -> tuple[str, Entry]:
        """The file and header entry of a tensor, by the model's name. Raises FatalError where it is missing."""
        if wanted not in self.names:
            raise FatalError(f"{self.path} has no tensor {self._told(self.spelled(wanted))}", MODEL)
        name = self.names[wanted]
        file = self.index.files[name]
        entry = self.index.headers[file].get(name)
        if entry is None:
            raise FatalError(f"{self.directory / file} has no tensor {name}, which {INDEX} says is there", MODEL)
        return file, entry

    def check(self, part: Slice) -> None:
        """Raises FatalError unless the slice's tensor is present, with the expected shape and a supported dtype."""
        file, entry = self.find(part.tensor)
        where = f"{self.directory / file}: {self._told(self.names[part.tensor])}"
        scalar = part.shape == (1,) and entry.shape == ()
        if entry.shape != part.shape and not scalar:
            expected = " x ".join(map(str, part.shape))
            raise FatalError(f"{where} is {' x '.join(map(str, entry.shape))}, expected {expected}", MODEL)
        wanted = part.spec.dtype
        kinds = [kind for kind, dtype in DTYPES.items() if dtype == wanted]
        if wanted is None or wanted in FLOATS.values():
            kinds = [*FLOATS, *(ggml.CODECS if self.index.path else ())]
        if wanted == torch.float32:
            kinds.append("F8_E8M0")  # scales
        if entry.dtype not in kinds:
            raise FatalError(f"{where} has dtype {entry.dtype}; supported are {', '.join(kinds)}", MODEL)

    def fill(self, part: Slice, target: Tensor) -> None:
        """Copy the slice from the mapped file into `target`, in its dtype and on its device."""
        if target.numel() == 0:  # this rank's shard is padding alone
            return
        entry, values, rows = self._values(part)
        put(values, target[:, None] if len(part.shape) == 1 else target, entry, *rows)

    def lend(self, part: Slice) -> Tensor | None:
        """The slice as it lies in the mapped file, where the file has its bytes one behind the other and unchanged."""
        entry = self.find(part.tensor)[1]
        if entry.dtype != "U8" or entry.order is not None or not part.numel:
            return None
        values = self._values(part)[1]
        return values if values.is_contiguous() else None

    def _values(self, part: Slice) -> tuple[Entry, Tensor, tuple[int, tuple[int, int]]]:
        """The slice's elements, a view of the mapped file where they are stored so; and, as `put` takes them, the
        file's first row of them and the model's rows."""
        file, entry = self.find(part.tensor)
        ranges = part.ranges if len(part.shape) > 1 else (*part.ranges, (0, 1))
        read = widened(entry, ranges)
        (first, last), width = read[0], entry.width
        try:
            mapped = self._map(file)
            _fetch(mapped, entry.start + first * width, entry.start + last * width)
        except OSError as error:
            name = self._told(self.names[part.tensor])
            raise FatalError(f"{self.directory / file}: {name} cannot be read: {_why(error)}", MODEL) from None
        data = torch.frombuffer(mapped, dtype=torch.uint8)[entry.start : entry.stop]
        return entry, elements(window(data, entry, 0, read), entry, ranges[-1]), (first, ranges[0])

    def _told(self, name: str) -> str:
        """A tensor's name as its file has it, for messages."""
        return checkpoint.spelled(self.path, name) if self.index.path else name

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            with untrusted_files.open_weights(self.directory / file) as opened:
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


def widened(entry: Entry, ranges: Ranges) -> Ranges:
    """The parts to read of a tensor for the model's `ranges` of it."""
    if entry.order is None:
        return ranges
    if entry.order.columns:
        return (*ranges[:-1], entry.order.whole(*ranges[-1]))
    return (entry.order.whole(*ranges[0]), *ranges[1:])


def places(order: Order, at: Tensor) -> Tensor:
    """The model's places of the file's rows or columns `at`, int64."""
    later = at - order.first
    within, each = later % order.period // order.each, later % order.each
    place = later - later % order.period + (within % order.b * order.a + within // order.b) * order.each + each
    return torch.where(later < 0, at, place + order.first)


def kept(entry: Entry, first: int, last: int, ranges: Ranges) -> int:
    """How many elements of the file's rows first to last belong to the model's `ranges`."""
    inner = math.prod(stop - start for start, stop in ranges[1:])
    if entry.order is None or entry.order.columns:
        return (last - first) * inner
    place = places(entry.order, torch.arange(first, last))
    return int(((place >= ranges[0][0]) & (place < ranges[0][1])).sum()) * inner


def span(entry: Entry, left: int, right: int) -> tuple[int, int]:
    """The bytes of a row that hold its elements left to right: of quantised ones whole groups."""
    group, size = packing(entry)
    return left // group * size, -(-right // group) * size


def packing(entry: Entry) -> tuple[int, int]:
    """Neighbouring elements that are stored together, and their bytes."""
    if entry.dtype in DTYPES:
        return 1, DTYPES[entry.dtype].itemsize
    return ggml.CODECS[entry.dtype].group, ggml.CODECS[entry.dtype].bytes


def window(data: Tensor, entry: Entry, first: int, ranges: Ranges) -> Tensor:
    """A view [rows, ..., bytes] of `ranges` of a tensor. data: the bytes of its rows from `first` on."""
    inner = rows(entry.shape)[1:]
    whole = data.view(-1, *inner[:-1], span(entry, 0, inner[-1])[1])
    (top, bottom), *middle, (left, right) = ranges
    cut = [(top - first, bottom - first), *middle, span(entry, left, right)]
    return whole[tuple(slice(start, stop) for start, stop in cut)]


def elements(data: Tensor, entry: Entry, columns: tuple[int, int]) -> Tensor:
    """Bytes [..., bytes], a `window`, as the elements that were asked for; columns: which, of the last axis."""
    wanted, order = columns, entry.order if entry.order is not None and entry.order.columns else None
    if order is not None:
        columns = order.whole(*columns)
    if entry.dtype in DTYPES:
        dtype = DTYPES[entry.dtype]
        if data.storage_offset() % dtype.itemsize:  # the header has an odd length, as in old files
            data = data.clone(memory_format=torch.contiguous_format)
        values = data.view(dtype)
    else:
        left, right = columns
        begin = left % packing(entry)[0]
        values = ggml.dequantize(entry.dtype, data)[..., begin : begin + right - left]
    if order is not None:
        place = places(order, torch.arange(*columns))
        values = values[..., place.argsort()[wanted[0] - columns[0] : wanted[1] - columns[0]]]
    if entry.logarithms:
        return values.float().neg().log()
    return values.float() - entry.added if entry.added else values


def put(values: Tensor, target: Tensor, entry: Entry, first: int, wanted: tuple[int, int]) -> None:
    """Copy rows of a tensor, from the file's row `first` on, into the target, which has the model's rows `wanted`."""
    top, bottom = wanted
    if entry.order is None or entry.order.columns:
        target[first - top : first - top + len(values)].copy_(values)
        return
    place = places(entry.order, torch.arange(first, first + len(values)))
    here = (place >= top) & (place < bottom)
    if not here.all():
        place, values = place[here], values[here]
    target.index_copy_(0, (place - top).to(target.device), values.to(target))
