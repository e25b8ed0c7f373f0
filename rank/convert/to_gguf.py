"""Writes a GGUF file of a checkpoint: each matrix in the type that a mix has for it, one after the other.

gguf-py writes the metadata. What a file cannot hold of a model is logged at the end.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import gguf
import torch
from safetensors import safe_open
from torch import Tensor

from ...errors import MODEL, FatalError
from ..gguf import architectures as gguf_architectures
from ..gguf import mixes
from ..gguf.architectures import Architecture, _common
from ..gguf.checkpoint import NUMBER, added_to, orders_of, part_of
from ..gguf.types import BY_NAME
from ..model import architectures
from ..model.base import BESIDE, Args, SeeingArgs
from ..model.choices import sizes_of
from ..model.config import Config, read_config
from ..model.load import FURTHER, HARMLESS
from ..model.weights.safetensors import FLOATS, places
from ..safetensors_header import Index, Order, read_index
from . import ggml_blocks, gguf_experts

# --to → the mix or the type, and the number of general.file_type in llama.h.
TARGETS = {
    "f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32),
    "q4_0": ("Q4_0", 2), "q4_1": ("Q4_1", 3), "q8_0": ("Q8_0", 7), "q5_0": ("Q5_0", 8), "q5_1": ("Q5_1", 9),
    "q2k": ("Q2_K", 21), "q3k": ("Q3_K", 11), "q4k": ("Q4_K", 14), "q5k": ("Q5_K", 16), "q6k": ("Q6_K", 18),
    "iq4_nl": ("IQ4_NL", 25), "iq4_xs": ("IQ4_XS", 30),
    "q3km": ("q3km", 12), "q4km": ("q4km", 15), "q5km": ("q5km", 17),
}  # fmt: skip
# Arguments of a model that files spell otherwise, or that follow from the rest.
SPELLED_ANEW = "rope_parameters", "partial_rotary_factor", "num_local_experts", "rotary_dim"
# From these follows what each layer attends to, which is compared itself.
REACHES = "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern"
# Matrices that stay in F32: routers, convolutions, positions, norms of heads.
KEPT = "ffn_gate_inp", "ssm_conv1d", "position_embd", "attn_q_norm", "attn_k_norm"
EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Planned(NamedTuple):
    """A tensor of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    sources: list[str]  # the checkpoint's tensors: of experts one each
    make: Callable[[Sequence[Tensor]], Tensor] | None = None  # of these, where they have another form


def write(source: Path, file: Path, to: str, tokenizer: dict[str, Any], device: str, bar: Callable[..., Any]) -> None:
    """source: a directory with config.json and safetensors. tokenizer: its metadata. bar: makes one by its total.

    Raises FatalError where the architecture, or one of the tensors, has no place in GGUF files.
    """
    config = read_config(source)
    name = gguf_architectures.of_model(config.model_type)
    if name is None:
        raise FatalError(
            f"{source}: GGUF files of {config.model_type} models cannot be written; of these they can: "
            f"{', '.join(gguf_architectures.written())}",
            MODEL,
        )
    architecture = gguf_architectures.find(name)
    name = architecture.NAME or name
    index = read_index(source)
    plan = _plan(config, architecture, index, TARGETS[to][0])
    orders = orders_of(architecture, _keys(config))
    writer = gguf.GGUFWriter(file, name)
    vectors = _metadata(writer, config, architecture, to, tokenizer)
    _numbers(writer, source, index, config, architecture)
    for key, values in vectors.items():
        writer.add_tensor_info(key, (len(values),), torch.zeros(0).numpy().dtype, 4 * len(values))
    for one in plan:
        shape = (*one.shape[:-1], _bytes_of(one.type, one.shape[-1]))
        writer.add_tensor_info(
            one.name,
            shape,
            torch.zeros(0, dtype=torch.uint8).numpy().dtype,
            _product(shape),
            gguf.GGMLQuantizationType[one.type],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in vectors.values():
        writer.write_tensor_data(torch.tensor(values, dtype=torch.float32).numpy())
    with bar(sum(_product(one.shape) for one in plan)) as progress:
        for one in plan:
            weight = _read(source, index, one, orders.get(part_of(one.name)), architecture)
            writer.write_tensor_data(_encode(weight.to(device), one.type).cpu().numpy())
            progress.update(_product(one.shape))
    writer.close()


def differences(source: Path, file: Path) -> list[str]:
    """Differences between the file's config and config.json, as text."""
    found = []
    configs = [read_config(one) for one in (source, file)]
    there, here = (architectures.find(one.model_type).Args.from_config(one) for one in configs)
    name = gguf_architectures.of_model(configs[0].model_type)
    assert name is not None  # the file is there
    of_tower = {one.name for one in dataclasses.fields(SeeingArgs)} - {one.name for one in dataclasses.fields(Args)}
    anew = (*of_tower, *SPELLED_ANEW, *REACHES, *gguf_architectures.find(name).SPELLED_ANEW)
    for one in dataclasses.fields(there):
        mine, its = getattr(there, one.name), getattr(here, one.name, None)
        if not mine or one.name in anew:
            continue
        if isinstance(mine, float) and isinstance(its, int | float) and abs(mine - its) <= 1e-6 * abs(mine):
            continue
        if mine != its:
            found.append(f"{one.name} is {mine}, in the file {its}")
    reaches = [[_reach(args, i) for i in range(configs[0].num_layers)] for args in (there, here)]
    apart = [(i, *both) for i, both in enumerate(zip(*reaches, strict=True)) if both[0] != both[1]]
    if apart:
        first, mine, its = apart[0]
        further = f", and so on in {len(apart)} layers" if len(apart) > 1 else ""
        found.append(f"layer {first} has {mine}, in the file {its}{further}")
    return found


def _reach(args: Any, index: int) -> str:
    """The range that a layer attends to, as text."""
    if hasattr(args, "linear") and args.linear(index):
        return "linear attention"
    window = args.attention_params(index).window if hasattr(args, "attention_params") else 0
    return f"a window of {window} tokens" if window else "full attention"


def _plan(config: Config, architecture: Architecture, index: Index, mix: str) -> list[Planned]:
    model = architectures.find(config.model_type).Model
    known = Places(architecture)
    tied = bool(config.raw.get("tie_word_embeddings"))
    gathered: dict[str, dict[int, str]] = {}
    found = []
    by_ours = {model.rename(source): source for source in index.files}
    for ours, source in by_ours.items():
        if ours.startswith(BESIDE):  # llama.cpp has towers in files of their own
            continue
        if ours.endswith(HARMLESS) or source.startswith((*FURTHER, *model.LEFT_OUT)):
            continue
        if (tied and ours == "lm_head.weight") or known.is_number(ours):
            continue
        shape = index.headers[index.files[source]][source].shape
        if config.model_type == "gpt_oss" and (parts := gguf_experts.parts(ours, shape)) is not None:
            found += [_of_experts(one, known, [by_ours[field] for field in one.fields], mix, config) for one in parts]
            continue
        whole, number = known.whole(ours)
        # Parameters of no module of their own have in files the checkpoint's name, not the model's.
        name = known.of(whole) or known.of(model.spelled(ours))
        if name is None:
            raise FatalError(f"{config.path}: tensor {source} has no place in GGUF files of this architecture", MODEL)
        if _order(name)[0] >= config.num_layers:  # of a layer that predicts further tokens
            continue
        gathered.setdefault(name, {})[number] = source
    for name, several in gathered.items():
        sources = [several[i] for i in sorted(several)]
        shape = index.headers[index.files[sources[0]]][sources[0]].shape
        if len(shape) < (3 if "_exps." in name else 2 if part_of(name) in known.stacked else 0):
            shape = (len(sources), *shape)
        ones = architecture.ONES.get(part_of(name), ())
        shape = tuple(extent for axis, extent in enumerate(shape) if axis not in ones)
        found.append(Planned(name, _type_of(name, shape, mix, config, tied), shape, sources))
    return sorted(found, key=lambda one: _order(one.name))


def _of_experts(part: gguf_experts.Part, known: Places, sources: list[str], mix: str, config: Config) -> Planned:
    name = known.of(part.name)
    assert name is not None
    type = gguf_experts.MXFP4 if part.packed else _type_of(name, part.shape, mix, config, False)
    return Planned(name, type, part.shape, sources, part.make)


class Places:
    """Names in a file of this architecture for each tensor of a checkpoint: the reverse of its tables."""

    def __init__(self, architecture: Architecture):
        tensors, endings = architecture.TENSORS, architecture.ENDINGS
        self._names, special = {}, set()  # with their endings
        for theirs, ending in endings.items():
            part, _, usual = theirs.rpartition(".")
            special.add(key := f"blk.{{}}.{part}")
            self._names[f"{tensors[key]}.{ending}"] = f"{key}.{usual}"
        self._parts = {ours: key for key, ours in tensors.items() if key not in special}
        self._numbers = set(architecture.PER_LAYER.values())
        self.stacked = architecture.STACKED
        self._rows = [f".{rows}." for rows in set(self.stacked.values())]

    def of(self, name: str) -> str | None:
        """A checkpoint's tensor; None: it has none."""
        stem, _, ending = name.rpartition(".")
        pattern = _pattern(name)
        if (whole := self._names.get(pattern) or self._parts.get(pattern)) is not None:
            return whole.format(*NUMBER.findall(name))
        part = self._parts.get(_pattern(f"{stem}.").removesuffix("."))
        if part is None or ending not in ("weight", "bias"):
            return None
        return f"{part.format(*NUMBER.findall(name))}.{ending}"

    def whole(self, name: str) -> tuple[str, int]:
        """A checkpoint's tensor that is one of several of a file's: what they are together, and its number."""
        if expert := EXPERT.search(name):
            return EXPERT.sub(".experts.", name), int(expert[1])
        for rows in self._rows:
            stem, found, rest = name.partition(rows)
            if found:
                number, _, ending = rest.partition(".")
                return f"{stem}.{ending}", int(number)
        return name, 0

    def is_number(self, name: str) -> bool:
        """Whether it is one of the metadata."""
        return _pattern(name) in self._numbers


def _pattern(name: str) -> str:
    return NUMBER.sub("{}", name)


def _keys(config: Config) -> dict[str, Any]:
    """config.json's, with the usual values of what it leaves out."""
    args = architectures.find(config.model_type).Args.from_config(config)
    given = {key: value for key, value in config.raw.items() if value is not None}
    types = [args.layer_type(i) for i in range(config.num_layers)] if hasattr(args, "layer_type") else None
    derived = {"layer_types": types} if types is not None else {}
    return vars(args) | given | derived | {"model_type": config.model_type, "head_dim": config.head_dim}


def _numbers(writer: Any, source: Path, index: Index, config: Config, architecture: Architecture) -> None:
    """Tensors of one element that files have among their metadata."""
    layers = range(config.num_layers)
    for key, ours in architecture.PER_LAYER.items():
        names = [ours.format(i) for i in layers]
        _add(writer, key, [float(_tensor(source, index, name)) for name in names])
    for key, value in architecture.FIXED.items():
        _add(writer, key, [value for _ in layers])


def _order(name: str) -> tuple[int, str]:
    numbers = NUMBER.findall(name)
    return (int(numbers[0]) if numbers else -1), name


def _type_of(name: str, shape: tuple[int, ...], mix: str, config: Config, tied: bool) -> str:
    part, layer = name.removesuffix(".weight").split(".")[-1], max(_order(name)[0], 0)
    if len(shape) < 2 or part in KEPT or not name.endswith(".weight"):
        return "F32"
    if part == "token_embd" and tied:
        part = "output"
    return mixes.fitting(mixes.type_of(mix, part, layer, sizes_of(config)), shape[-1])


def _read(source: Path, index: Index, one: Planned, order: Order | None, architecture: Architecture) -> Tensor:
    """In the form and order that files have it."""
    tensors = [_tensor(source, index, name) for name in one.sources]
    if one.make is not None:
        return one.make(tensors).contiguous()
    weight = torch.stack(tensors) if len(tensors) > 1 else tensors[0].reshape(one.shape)
    if order is not None:
        axis = weight.dim() - 1 if order.columns else 0
        weight = weight.index_select(axis, places(order, torch.arange(weight.shape[axis])))
    if part_of(one.name) in architecture.LOGARITHMS:
        weight = -weight.float().exp()
    if added := added_to(architecture, one.name):
        weight = weight.float() + added
    return weight.contiguous()


def _tensor(source: Path, index: Index, name: str) -> Tensor:
    with safe_open(source / index.files[name], "pt") as opened:
        return cast(Tensor, opened.get_tensor(name))


def _encode(weight: Tensor, type: str) -> Tensor:
    """[..., inputs] → uint8 [..., bytes]."""
    if type in FLOATS:
        plain = weight.to(FLOATS[type]).contiguous()
        return plain.view(torch.uint8) if plain.dim() else plain
    if type == gguf_experts.MXFP4:  # it comes so
        return weight
    return ggml_blocks.encode(type, weight.flatten(0, -2)).view(*weight.shape[:-1], -1)


def _bytes_of(type: str, elements: int) -> int:
    return elements // BY_NAME[type].group * BY_NAME[type].bytes


def _product(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _metadata(
    writer: Any, config: Config, architecture: Architecture, to: str, tokenizer: dict[str, Any]
) -> dict[str, list[float]]:
    """Returns vectors that are tensors in the file."""
    raw = _keys(config)
    rope, vectors = _common.rope_keys(raw)
    writer.add_name(config.path.resolve().name)
    writer.add_file_type(TARGETS[to][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in (_common.keys(raw) | rope | architecture.keys(raw)).items():
        _add(writer, f"{writer.arch}.{key}", value)
    for key, value in tokenizer.items():
        _add(writer, key, value)
    return vectors


def _add(writer: Any, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)
