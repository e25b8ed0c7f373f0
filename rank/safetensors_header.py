"""The headers of safetensors files, single or sharded: which tensors lie where, without a byte of weights.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian, the header as
JSON, then the tensors, whose `data_offsets` count from the header's end. No torch here: `phalanx fit` reads them too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import MODEL, FatalError
from . import json_decoding, untrusted_files
from .json_decoding import Kind

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WIDTHS = {  # bytes of an element, of the kinds that ranks read
    "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1,
}  # fmt: skip
LONGEST = 100_000_000  # bytes of a header, as the format limits them; other files would ask for any memory
MAX_TENSORS = 300_000  # of a file; the largest checkpoints have 140,000 in all of theirs
MAX_AXES = 8


class Order(msgspec.Struct, frozen=True, array_like=True):
    """The order of a tensor's rows or columns in a GGUF file, where the model has another.

    From `first` on the file has them as [again and again, a, b, each], the model as [again and again, b, a, each].
    """

    a: int
    b: int
    each: int = 1
    first: int = 0
    columns: bool = False

    @property
    def period(self) -> int:
        """Neighbours among which the order changes."""
        return self.a * self.b * self.each

    def whole(self, start: int, stop: int) -> tuple[int, int]:
        """The file's parts for the model's rows or columns start to stop."""
        if stop <= self.first:
            return start, stop
        begin = start if start < self.first else start - (start - self.first) % self.period
        return begin, stop + (self.first - stop) % self.period


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as a file's header describes it; its bytes are those from `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    # GGUF files only:
    order: Order | None = None
    added: float = 0.0  # to every element, which has to be taken off again
    logarithms: bool = False  # of each element x it has -exp(x)

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return (self.stop - self.start) // max(1, rows(self.shape)[0])


class _Written(msgspec.Struct):
    """One tensor as the header has it."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _WrittenIndex(msgspec.Struct):
    weight_map: dict[str, str]


class Index(msgspec.Struct):
    """All headers of a checkpoint, in a form that one rank can send to the others."""

    files: dict[str, str]  # tensor → the file that should hold it
    headers: dict[str, dict[str, Entry]]  # file → its tensors
    path: str = ""  # of the GGUF file whose tensors these are, renamed; empty: of safetensors


def rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor as rows of at least one element: a vector has rows of one."""
    return tuple(shape) if len(shape) > 1 else (math.prod(shape), 1)


def weight_files(path: Path) -> dict[str, str]:
    """Which file holds each tensor by the index, or the single file under the name "" where there is no index.

    Raises FatalError where there are no weights or the index is garbled.
    """
    index = path / INDEX
    if index.exists():
        return _read_index(index)
    if (path / SINGLE).exists():
        return {"": SINGLE}
    raise FatalError(f"{path} has neither {SINGLE} nor {INDEX}{_hint(path)}", MODEL)


def _hint(path: Path) -> str:
    """Advice about a directory's other files, for a message."""
    found = {one.suffix: one for one in sorted(path.iterdir(), reverse=True)}  # the first of each kind
    if gguf := found.get(".gguf"):
        return f"; a GGUF file is served by its own path: {gguf}"
    if tensors := found.get(".safetensors"):
        return f"; {tensors.name} is not read without an index of the tensors in each file"
    if pickle := found.get(".bin") or found.get(".pt") or found.get(".pth"):
        return f"; {pickle.name} is not read, as pickled weights can run code: convert them to safetensors"
    return ""


def read_index(path: Path) -> Index:
    """The headers of all weight files. Raises FatalError where one is missing, damaged or cut off."""
    files = weight_files(path)
    found = list(dict.fromkeys(files.values()))
    for file in found:
        if not (path / file).exists():
            raise FatalError(f"{path}: {INDEX} names {file}, which is missing", MODEL)
    headers = {file: read_header(path / file) for file in found}
    if "" in files:
        files = dict.fromkeys(headers[SINGLE], SINGLE)
    return Index(files, headers)


def read_header(file: Path) -> dict[str, Entry]:
    """A file's tensors. Raises FatalError where it is none, or its length is not its header's."""
    try:
        with untrusted_files.open_weights(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > size - 8:  # the number is bytes of the file, and not shown: it may be no weights
                raise ValueError(f"the length of its header, its first 8 bytes, does not fit into its {size} bytes")
            if length > LONGEST:
                raise ValueError(f"its header would be longer than the {LONGEST} bytes that one may have")
            data = opened.read(length)
        if data.count(b":") > 5 * MAX_TENSORS:  # of an entry there are at least four
            raise ValueError(f"its header has more than {MAX_TENSORS} tensors")
        begin = 8 + length
        entries = {name: _entry(name, said, begin) for name, said in _decode(data, dict[str, msgspec.Raw]).items()
                   if name != "__metadata__"}  # fmt: skip
        end = max((entry.stop for entry in entries.values()), default=begin)
        if end != size:
            raise ValueError(f"its header tells of {end} bytes, the file has {size}")
    except OSError as error:
        raise FatalError(f"{file} cannot be read: {error.strerror}", MODEL) from None
    except ValueError as error:
        raise FatalError(f"{file} is damaged or truncated: {_reason(file, error)}", MODEL) from None
    return entries


def _decode(data: bytes | msgspec.Raw, kind: type[Kind], what: str = "its header") -> Kind:
    try:
        return json_decoding.decode_as(data, kind)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


def _entry(name: str, raw: msgspec.Raw, begin: int) -> Entry:
    """One tensor of a header; ValueError where its bytes are not what its shape needs."""
    said = _decode(raw, _Written, f"its header's entry of {name}")
    start, stop = said.data_offsets
    entry = Entry(said.dtype, tuple(said.shape), begin + start, begin + stop)
    if len(entry.shape) > MAX_AXES or not all(0 <= extent < 1 << 63 for extent in entry.shape):
        raise ValueError(f"{name} has no shape that a tensor may have")
    width = WIDTHS.get(entry.dtype)
    if stop < start or start < 0 or (width is not None and math.prod(entry.shape) * width != stop - start):
        raise ValueError(f"{stop - start} bytes for {name}, {entry.dtype} of shape {list(entry.shape)}")
    return entry


def _reason(file: Path, error: Exception) -> str:
    with untrusted_files.open_weights(file) as opened:
        if opened.read(24) == b"version https://git-lfs.":
            return "it is a Git LFS pointer; fetch the real file with `git lfs pull`"
    return str(error)


def _read_index(index: Path) -> dict[str, str]:
    try:
        data = untrusted_files.read_bytes(index.parent, index.name)
        found = json_decoding.decode_as(data, _WrittenIndex).weight_map
    except OSError as error:
        raise FatalError(f"{index} cannot be read: {error.strerror}", MODEL) from None
    except ValueError as error:
        raise FatalError(f"{index} is garbled: it {error}", MODEL) from None
    if outside := next((one for one in found.values() if one.startswith("/") or ".." in Path(one).parts), None):
        raise FatalError(f"{index} names {outside!r}, which is outside of the model's directory", MODEL)
    return found
