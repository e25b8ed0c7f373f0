"""A GGUF file, or all shards of one, as the checkpoint of a model that config.json would describe."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ...errors import MODEL, FatalError
from ..safetensors_header import Entry, Index, Order
from . import architectures, towers
from .architectures import Architecture
from .header import Header, Tensor, read
from .metadata import Metadata

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_mmproj: dict[Path, Path] = {}  # files with the towers of models' files
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
    """The model's common name: the file's name without its ending and its number as a shard."""
    found = SHARD.fullmatch(path.name)
    return found[1] if found else path.stem


def pair(path: str | Path, mmproj: str | Path) -> None:
    """Say which mmproj file belongs to a model's file, for all of this process; empty: none."""
    if mmproj:
        _mmproj[Path(path)] = Path(mmproj)
    else:
        _mmproj.pop(Path(path), None)


def mmproj(path: Path) -> Path | None:
    """The mmproj file that belongs to a model's file."""
    return _mmproj.get(path)


def headers(path: Path) -> list[Header]:
    """Opens all shards. Raises FatalError where one is missing, damaged or another's."""
    files = shards(path)
    for file in files:
        if not file.is_file():
            raise FatalError(f"there is no file {file}", MODEL)
    found = [read(file) for file in files]
    count = found[0].metadata.get("split.count", 0)
    if count not in (0, 1, len(files)):
        raise FatalError(f"{path} is one of {count} shards by its metadata, but {len(files)} by its name", MODEL)
    return found


def config(path: Path, beside: Path | None = None) -> dict[str, Any]:
    """The config.json that the same model would have. beside: its mmproj file; None: the one that was named for it.

    Raises FatalError where the architecture is not supported.
    """
    m = Metadata(headers(path))
    architecture = _architecture(m)
    keys = architecture.config(m)
    parts = [(m, architecture, keys)]
    if tower := _tower(beside or mmproj(path)):
        parts.append(tower)
    types = {}
    for part, entries, sizes in parts:
        orders = orders_of(entries, sizes)
        for name, tensor in part.matrices():
            keeps = _keeps_groups(orders.get(part_of(name)), tensor)
            # Three axes: all experts of a layer
            if tensor.type.group > 1 and len(tensor.shape) in (2, 3) and keeps:
                types[_rename(entries, name).removesuffix(".weight")] = tensor.type.name
    quantization = {"quantization_config": {"quant_method": "gguf", "types": types}} if types else {}
    whole = keys if tower is None else towers.config(tower[0], m, keys)
    return whole | {"dtype": _dtype(m)} | quantization


def read_index(path: Path) -> Index:
    """The tensors under the names that the architecture's own checkpoints give them. Those that are quantised are there
    twice: as elements, and as blocks."""
    found = headers(path)
    m = Metadata(found)
    architecture = _architecture(m)
    keys = architecture.config(m)
    index = Index({}, {}, path=str(path))
    for header in found:
        entries = _entries(header, architecture, keys, index)
        for key, ours in architecture.PER_LAYER.items():
            entries |= _numbers(header, key, ours, keys["num_hidden_layers"])
        _add(index, header.file.name, entries)
    if (tower := _tower(mmproj(path))) is not None:
        # Its name is absolute, so that it leads there from the model's directory, too.
        _add(index, str(tower[0].file.absolute()), _entries(read(tower[0].file), *tower[1:], index))
    return index


def _add(index: Index, file: str, entries: dict[str, Entry]) -> None:
    index.headers[file] = entries
    index.files |= dict.fromkeys(entries, file)


def _entries(header: Header, architecture: Architecture, keys: dict[str, Any], index: Index) -> dict[str, Entry]:
    """A file's tensors. index: has those of the files before it."""
    orders, entries = orders_of(architecture, keys), dict[str, Entry]()
    for name, tensor in header.tensors.items():
        ours = _rename(architecture, name)
        if not ours:
            continue
        part = part_of(name)
        if part in architecture.STACKED:
            made = _rows(ours, architecture.STACKED[part], tensor)
        else:
            tensor = tensor._replace(shape=_shape(architecture, name, tensor.shape))
            order = orders.get(part)
            _check_order(f"{header.file}: {name}", order, tensor)
            made = {ours: _entry(architecture, name, tensor, order)}
            if tensor.type.group > 1 and _keeps_groups(order, tensor):
                made[ours.removesuffix(".weight") + BLOCKS] = _blocks(tensor, order)
        if twice := next((one for one in made if one in index.files or one in entries), None):
            other = index.files.get(twice, header.file)
            raise FatalError(f"{header.file}: tensor {name} is in {other} as well, by this name or another", MODEL)
        entries |= made
    return entries


def _tower(file: Path | None) -> tuple[Metadata, Architecture, dict[str, Any]] | None:
    """The metadata of a mmproj file, how its tensors are called, and sizes that their orders need."""
    if file is None:
        return None
    m = Metadata([read(file)])
    architecture = towers.find(m).architecture(m)
    head_dim = towers.size(m, "embedding_length") // towers.size(m, "attention.head_count")
    return m, architecture, {"head_dim": head_dim}


def spelled(path: Path, name: str) -> str:
    """A tensor's name in the file, by the one that the architecture's own checkpoints give it; for messages."""
    if name.endswith(BLOCKS):
        name = name.removesuffix(BLOCKS) + ".weight"
    tower = _tower(mmproj(path))
    tensors: dict[str, str] = _architecture(Metadata(headers(path))).TENSORS | (tower[1].TENSORS if tower else {})
    numbers, pattern = NUMBER.findall(name), NUMBER.sub("{}", name)
    for theirs, ours in tensors.items():
        if ours and (pattern == ours or pattern.startswith(ours + ".")):
            return (theirs + pattern.removeprefix(ours)).format(*numbers)
        if ours and name.startswith(ours + "."):
            return theirs + name.removeprefix(ours)
    return name


def _architecture(m: Metadata) -> Architecture:
    name = architectures.spelled(m.architecture)
    if name not in architectures.supported():
        raise FatalError(
            f"{m.file}: architecture {m.architecture!r} is not supported; supported are "
            f"{', '.join(architectures.supported())}",
            MODEL,
        )
    return architectures.find(name)


def _rename(architecture: Architecture, name: str) -> str:
    """Empty: it is not read as a weight. Of a tensor that the table does not know its own name."""
    numbers, pattern = NUMBER.findall(name), NUMBER.sub("{}", name)
    if pattern in architecture.TENSORS:  # one without an ending
        return architecture.TENSORS[pattern].format(*numbers)
    stem, _, ending = pattern.rpartition(".")
    if (of_this := name.rpartition(".")[0]) in architecture.TENSORS:  # with its number
        stem = of_this
    if stem not in architecture.TENSORS:
        return name
    ours = architecture.TENSORS[stem]
    ending = architecture.ENDINGS.get(pattern.rpartition("{}.")[2], ending)
    return f"{ours.format(*numbers)}.{ending}" if ours else ""


def part_of(name: str) -> str:
    """The kind of a layer's tensor, without its number and its ending."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def orders_of(architecture: Architecture, keys: dict[str, Any]) -> dict[str, Order]:
    """Parts of tensors' names that the file has in another order than the model."""
    found = {part: Order(keys["head_dim"] // 2, 2) for part in architecture.PAIRED}
    return found | architecture.orders(keys)


def added_to(architecture: Architecture, name: str) -> float:
    """The number that files add to each element of a tensor."""
    changed = name.endswith("norm.weight") and part_of(name) not in architecture.UNCHANGED
    return architecture.ADDED if changed else 0.0


def _keeps_groups(order: Order | None, tensor: Tensor) -> bool:
    """Whether groups of inputs that are quantised together stay together in the model's order."""
    return order is None or not order.columns or order.each % tensor.type.group == 0


def _check_order(where: str, order: Order | None, tensor: Tensor) -> None:
    if order is None:
        return
    extent = tensor.shape[-1 if order.columns else 0]
    if order.period < 1 or extent < order.first or (extent - order.first) % order.period:
        kind = "columns" if order.columns else "rows"
        raise FatalError(f"{where} has {extent} {kind}, no heads of {order.period}", MODEL)


def _shape(architecture: Architecture, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape in the model."""
    part = part_of(name)
    if part in architecture.FLAT:
        return (math.prod(shape),)
    ones = architecture.ONES.get(part)
    if ones is None or name.endswith(".bias"):
        return shape
    found = [extent for extent in shape if extent != 1]
    for axis in ones:
        found.insert(axis, 1)
    return tuple(found)


def _entry(architecture: Architecture, name: str, tensor: Tensor, order: Order | None) -> Entry:
    logarithms = part_of(name) in architecture.LOGARITHMS
    added = added_to(architecture, name)
    return Entry(tensor.type.name, tensor.shape, tensor.start, tensor.stop, order, added, logarithms)


def _blocks(tensor: Tensor, order: Order | None) -> Entry:
    group, size = tensor.type.group, tensor.type.bytes
    if order is not None and order.columns:  # of bytes
        order = Order(order.a, order.b, order.each // group * size, order.first // group * size, columns=True)
    width = tensor.shape[-1] // group * size
    return Entry("U8", (*tensor.shape[:-1], width), tensor.start, tensor.stop, order)


def _numbers(header: Header, key: str, ours: str, layers: int) -> dict[str, Entry]:
    """Numbers of the metadata as tensors of one element: one for each layer, or the same for all."""
    if key not in header.places:
        return {}
    start, count = header.places[key]
    if count not in (1, layers):
        raise FatalError(f"{header.file}: the metadata's {key} has {count} numbers for {layers} layers", MODEL)
    starts = [start + 4 * (i if count > 1 else 0) for i in range(layers)]
    return {ours.format(i): Entry("F32", (1,), at, at + 4) for i, at in enumerate(starts)}


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
    """The dtype of most of the file's plain matrices; bfloat16 where there are none."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    sizes = dict.fromkeys(names, 0)
    for _, tensor in m.matrices():
        if tensor.type.name in sizes:
            sizes[tensor.type.name] += tensor.stop - tensor.start
        else:
            return "bfloat16"
    return names[max(sizes, key=sizes.__getitem__)]
