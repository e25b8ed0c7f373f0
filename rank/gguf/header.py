"""The header of a GGUF file: its metadata, and which tensor lies where.

The format: docs/gguf.md of https://github.com/ggml-org/ggml. Numbers are little-endian. gguf-py's reader needs 16 s for
a vocabulary of 128k tokens with its merges, where this one takes half a second, and it meets damaged files with
whatever error comes; so it is the reference of the tests.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...errors import MODEL, FatalError
from .. import untrusted_files
from .types import TYPES, Type

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of the tensors' data, where general.alignment says nothing else
LONGEST = 1 << 30  # bytes of a string or an array: damaged files would ask for any memory
MAX_ELEMENTS = 1 << 24  # of an array; the largest vocabularies have 262,144 tokens
MAX_AXES = 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT, STRING, ARRAY = 6, 8, 9


class Tensor(NamedTuple):
    """Its bytes are those from `start` to `stop` of the file."""

    type: Type
    shape: tuple[int, ...]  # the last axis runs along neighbours, as in safetensors; files have it first
    start: int
    stop: int


class Header(NamedTuple):
    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    places: dict[str, tuple[int, int]]  # of the metadata's floats of 32 bits: where they begin, and how many there are


def read(file: Path, texts: bool = False) -> Header:
    """texts: with the tokenizer's arrays, which are large. Raises FatalError, code MODEL, where the file is none, or is
    damaged, truncated or of a kind that is not known."""
    try:
        return _read(*state(file), texts)
    except OSError as error:
        raise FatalError(f"{file} cannot be read: {error.strerror}", MODEL) from None
    except ValueError as error:
        raise FatalError(f"{file} is damaged or truncated: {error}", MODEL) from None


def state(file: Path) -> tuple[Path, int, int]:
    """The file with its size and time of change: what its contents are known by in a cache. Raises FatalError."""
    try:
        found = file.stat()
    except OSError as error:
        raise FatalError(f"{file} cannot be read: {error.strerror}", MODEL) from None
    return file, found.st_size, found.st_mtime_ns


@functools.lru_cache(3)  # each of several questions about a model, its vocabulary and its mmproj file reads a header
def _read(file: Path, size: int, changed: int, texts: bool) -> Header:
    with untrusted_files.open_weights(file) as opened:
        return _Reader(opened, size, texts).header(file)


class _Reader:
    """Raises ValueError where the file contradicts its own numbers."""

    def __init__(self, file: BinaryIO, size: int, texts: bool):
        self._file, self._size, self._texts = file, size, texts
        self._places: dict[str, tuple[int, int]] = {}
        self._what = "its header"  # what is read, for messages

    def header(self, file: Path) -> Header:
        magic = self._take(4)
        if magic != MAGIC:
            raise FatalError(f"{file} is not a GGUF file: it does not begin with {MAGIC!r}", MODEL)
        version = self._number("I")
        if version not in VERSIONS:
            why = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise FatalError(f"{file} is {why}; GGUF of versions 2 and 3, little-endian, can be read", MODEL)
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            self._what = f"the name of entry {index} of the metadata"
            key = self._string()
            self._what = f"the metadata's {key}"
            if key in metadata:
                raise ValueError(f"{self._what} is there twice")
            metadata[key] = value = self._value(keep=self._texts or not key.startswith("tokenizer.ggml."))
            if self._kind == FLOAT and value is not None:
                values = value if isinstance(value, list) else [value]
                self._places[key] = self._file.tell() - 4 * len(values), len(values)
        tensors = self._tensors(num_tensors, metadata.get("general.alignment", ALIGNMENT))
        return Header(file, metadata, tensors, self._places)

    def _tensors(self, count: int, alignment: Any) -> dict[str, Tensor]:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
        found: dict[str, tuple[Type, tuple[int, ...], int]] = {}
        for index in range(count):
            self._what = f"the name of tensor {index}"
            name = self._string()
            self._what = f"the entry of tensor {name}"
            if name in found:
                raise ValueError(f"tensor {name} is there twice")
            axes = self._number("I")
            if not 1 <= axes <= MAX_AXES:
                raise ValueError(f"tensor {name} has {axes} axes")
            shape = tuple(self._number("Q") for _ in range(axes))[::-1]
            number = self._number("I")
            if number not in TYPES:
                raise ValueError(f"tensor {name} is of an unknown type, {number}, maybe a newer one")
            found[name] = TYPES[number], shape, self._number("Q")
        begin = -(-self._file.tell() // alignment) * alignment
        return {name: self._place(name, *entry, begin, alignment) for name, entry in found.items()}

    def _place(self, name: str, type: Type, shape: tuple[int, ...], offset: int, begin: int, alignment: int) -> Tensor:
        size = type.bytes
        for extent in shape:
            size *= extent
        if not size:
            raise ValueError(f"tensor {name} is empty: its shape is {list(shape)}")
        if shape[-1] % type.group:
            raise ValueError(f"tensor {name} has rows of {shape[-1]}, but {type.name} has groups of {type.group}")
        size //= type.group
        if offset % alignment:
            raise ValueError(f"tensor {name} begins at {offset}, not at a multiple of {alignment}")
        if begin + offset + size > self._size:
            raise ValueError(f"tensor {name} ends at byte {begin + offset + size}, the file has {self._size}")
        return Tensor(type, shape, begin + offset, begin + offset + size)

    def _take(self, count: int) -> bytes:
        if count > LONGEST:
            raise ValueError(f"{self._what} would be longer than {LONGEST} bytes")
        data = self._file.read(count) if count <= self._size else b""
        if len(data) < count:
            raise ValueError(f"it ends within {self._what}")
        return data

    def _number(self, code: str) -> int:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        data = self._take(self._number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self._what} is no text") from None

    def _value(self, keep: bool) -> Any:
        self._kind = kind = self._number("I")  # of an array its elements'
        if kind != ARRAY:
            return self._scalar(kind)()
        self._kind = kind = self._number("I")
        count = self._number("Q")
        if count > MAX_ELEMENTS:
            raise ValueError(f"{self._what} would have more than {MAX_ELEMENTS} elements")
        if code := SCALARS.get(kind):
            data = self._take(count * struct.calcsize(f"<{code}"))
            return list(struct.unpack(f"<{count}{code}", data)) if keep else None
        if kind != STRING:
            raise ValueError(f"{self._what} is of an unknown kind, {kind}")
        if count > self._size:  # each has a byte at least
            raise ValueError(f"it ends within {self._what}")
        return self._strings(count, keep)

    def _strings(self, count: int, keep: bool) -> list[str] | None:
        """A loop with no call that can be spared: a vocabulary has hundreds of thousands."""
        read, whole, longest = self._file.read, int.from_bytes, min(self._size, LONGEST)
        found: list[bytes] = []
        for _ in range(count):
            head = read(8)
            size = whole(head, "little")
            if len(head) < 8 or size > longest or len(data := read(size)) < size:
                raise ValueError(f"it ends within {self._what}")
            if keep:
                found.append(data)
        try:
            return [data.decode() for data in found] if keep else None
        except UnicodeDecodeError:
            raise ValueError(f"{self._what} is no text") from None

    def _scalar(self, kind: int) -> Callable[[], Any]:
        if kind == STRING:
            return self._string
        if kind not in SCALARS:
            raise ValueError(f"{self._what} is of an unknown kind, {kind}")
        return functools.partial(self._number, SCALARS[kind])
