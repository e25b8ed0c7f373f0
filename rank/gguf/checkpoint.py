"""A GGUF file, or all shards of one, as the checkpoint of a model that config.json would describe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...errors import MODEL, FatalError
from ..safetensors_header import Entry, Index
from . import architectures
from .header import Header, Tensor, read
from .metadata import Metadata

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
BLOCKS = ".blocks"  # ends the name of a quantised tensor as it is stored: bytes, by rows


def is_gguf(path: str | Path) -> bool:
    """Whether a model's path is a GGUF file's; others are directories."""
    return Path(path).suffix.lower() == ".gguf"


def shards(path: Path) -> list[Path]:
    """All files of the model whose first, or only, file is at `path`. Raises FatalError where it is another one."""
    found = SHARD.fullmatch(path.name)
    if not found:
        return [path]
    stem, number, count = found[1], int(found[2]), int(found[3])
    first = path.with_name(f"{stem}-00001-of-{count:05}.gguf")
    if number != 1:
        raise FatalError(f"{path} is shard {number} of {count}: name the first one, {first.name}", MODEL)
    return [path.with_name(f"{stem}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]


def name(path: Path) -> str:
    """What people call the model: the file's name without its ending and its number as a shard."""
    found = SHARD.fullmatch(path.name)
    return found[1] if found else path.stem


def headers(path: Path) -> list[Header]:
    """Of all shards. Raises FatalError where one is missing, damaged or another's."""
    files = shards(path)
    for file in files:
        if not file.is_file():
            raise FatalError(f"there is no file {file}", MODEL)
    found = [read(file) for file in files]
    count = found[0].metadata.get("split.count", 0)
    if count not in (0, 1, len(files)):
        raise FatalError(f"{path} is one of {count} shards by its metadata, but {len(files)} by its name", MODEL)
    return found


def config(path: Path) -> dict[str, Any]:
    """What config.json of the same model would say. Raises FatalError where the architecture is not supported."""
    m = Metadata(headers(path))
    architecture = _architecture(m)
    types = {}
    for name, tensor in m.matrices():
        if tensor.type.group > 1 and len(tensor.shape) in (2, 3):  # 3: of all experts of a layer
            types[_rename(architecture, name).removesuffix(".weight")] = tensor.type.name
    quantization = {"quantization_config": {"quant_method": "gguf", "types": types}} if types else {}
    return architecture.config(m) | {"dtype": _dtype(m)} | quantization


def read_index(path: Path) -> Index:
    """The tensors under the names that the architecture's own checkpoints give them. Those that are quantised are there
    twice: as elements, and as blocks."""
    found = headers(path)
    m = Metadata(found)
    architecture = _architecture(m)
    paired, added = getattr(architecture, "PAIRED", ()), getattr(architecture, "ADDED", 0.0)
    head_dim = architecture.config(m)["head_dim"] if paired else 0
    index = Index({}, {}, path=str(path))
    for header in found:
        entries = index.headers[header.file.name] = {}
        for name, tensor in header.tensors.items():
            ours = _rename(architecture, name)
            if not ours:
                continue
            if ours in index.files:
                raise FatalError(f"{header.file}: tensor {name} is in {index.files[ours]} as well", MODEL)
            part = name.rpartition(".")[0].rpartition(".")[2]
            if part in getattr(architecture, "STACKED", {}):
                entries |= _rows(ours, architecture.STACKED[part], tensor)
                continue
            if part in getattr(architecture, "ROWS", ()):
                tensor = tensor._replace(shape=(1, *tensor.shape[-1:]))
            pairs = head_dim if part in paired else 0
            if pairs and tensor.shape[0] % pairs:
                raise FatalError(f"{header.file}: {name} has {tensor.shape[0]} rows, no heads of {pairs}", MODEL)
            entries[ours] = _entry(tensor, pairs, added if name.endswith("norm.weight") else 0.0)
            if tensor.type.group > 1:
                entries[ours.removesuffix(".weight") + BLOCKS] = _blocks(tensor, pairs)
    index.files = {name: file for file, entries in index.headers.items() for name in entries}
    return index


def spelled(path: Path, name: str) -> str:
    """A tensor's name in the file, by the one that the architecture's own checkpoints give it; for messages."""
    if name.endswith(BLOCKS):
        name = name.removesuffix(BLOCKS) + ".weight"
    tensors: dict[str, str] = _architecture(Metadata(headers(path))).TENSORS
    numbers, pattern = NUMBER.findall(name), NUMBER.sub("{}", name)
    for theirs, ours in tensors.items():
        if ours and (pattern == ours or pattern.startswith(ours + ".")):
            return (theirs + pattern.removeprefix(ours)).format(*numbers)
    return name


def _architecture(m: Metadata) -> Any:
    name = architectures.spelled(m.architecture)
    if name not in architectures.supported():
        raise FatalError(
            f"{m.file}: architecture {m.architecture!r} is not supported; supported are "
            f"{', '.join(architectures.supported())}",
            MODEL,
        )
    return architectures.find(name)


def _rename(architecture: Any, name: str) -> str:
    """Empty: it is not read as a weight. Of a tensor that the table does not know its own name."""
    numbers, pattern = NUMBER.findall(name), NUMBER.sub("{}", name)
    stem, _, ending = pattern.rpartition(".")
    if stem not in architecture.TENSORS:
        return name
    ours = architecture.TENSORS[stem]
    ending = getattr(architecture, "ENDINGS", {}).get(pattern.rpartition("{}.")[2], ending)
    return f"{ours.format(*numbers)}.{ending}" if ours else ""


def _entry(tensor: Tensor, paired: int, added: float) -> Entry:
    return Entry(tensor.type.name, tensor.shape, tensor.start, tensor.stop, paired, added)


def _blocks(tensor: Tensor, paired: int) -> Entry:
    width = tensor.shape[-1] // tensor.type.group * tensor.type.bytes
    return Entry("U8", (*tensor.shape[:-1], width), tensor.start, tensor.stop, paired)


def _rows(name: str, under: str, tensor: Tensor) -> dict[str, Entry]:
    """The rows of a matrix as vectors of their own."""
    count, size = tensor.shape[0], (tensor.stop - tensor.start) // tensor.shape[0]
    stem, _, ending = name.rpartition(".")
    starts = range(tensor.start, tensor.stop, size)
    return {
        f"{stem}.{under}.{i}.{ending}": Entry(tensor.type.name, tensor.shape[1:], starts[i], starts[i] + size)
        for i in range(count)
    }


def _dtype(m: Metadata) -> str:
    """What most of the file's plain matrices are; bfloat16 where there are none."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    sizes = dict.fromkeys(names, 0)
    for _, tensor in m.matrices():
        if tensor.type.name in sizes:
            sizes[tensor.type.name] += tensor.stop - tensor.start
        else:
            return "bfloat16"
    return names[max(sizes, key=sizes.__getitem__)]
