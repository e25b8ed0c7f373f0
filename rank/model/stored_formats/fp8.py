"""FP8 (e4m3; Micikevicius et al. 2022, arXiv 2209.05433), as DeepSeek-V3 and Qwen3 store it in blocks of 128 x 128 and
others with one scale for all of a tensor. What becomes of activations does not
follow config.json: docs/formats.md.

Of a linear of I inputs and O outputs: weight e4m3 [O, I]; weight_scale_inv [O / 128, I / 128], which weights are
multiplied by, or one number for all: weight_scale, which Ministral 3 calls weight_scale_inv, too. Experts have the
same, each in tensors of its own. DeepSeek-V4 calls the scales of blocks `scale`, e8m0 or f32; its experts are MXFP4
where config.json's `expert_dtype` is fp4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....errors import MODEL, FatalError
from ....kernels.moe.moe import Matrices
from ....kernels.quantized import e4m3, floats
from ....kernels.quantized.codec import Codec
from ....kernels.quantized.floats import Floats
from ....kernels.quantized.linear import Halves
from ....kernels.quantized.stack import padded, stack
from ..formats._format import Format
from ..formats._stacks import AT_ONCE, Stacked, StoredStack
from ..shard import Shard
from ..weights.slicing import Field, Ratio, Scales, Source, stored_width
from . import is_stored, mxfp4
from ._part import StoredPart, check_settings

RANDOM = 0.38  # the deviation of weights/dummy.py's e4m3 numbers
HARMLESS = ".input_scale", ".activation_scale", ".k_scale", ".v_scale"


@dataclass(frozen=True)
class Scheme(Format):
    """How a linear, or each expert of a stack, is stored."""

    scale: str  # the tensor's name
    outputs: int  # that share a scale; 0: all
    inputs: int
    codec: Codec = e4m3

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return Part(self, inputs, outputs, bias, sources)

    def stack(self, layer: Stacked, sources: Sequence[Source]) -> StoredStack:
        return ExpertStack(self)

    def fields(self, axes: str = "") -> tuple[Field, ...]:
        """axes: before those of a linear."""
        ratios = {"o": Ratio(1, self.outputs, shared=True), "i": Ratio(1, self.inputs, shared=True)}
        one = "o" if not self.outputs and not self.inputs else "oi"
        return (
            Field("weight", f"{axes}oi", torch.float8_e4m3fn),
            Field(self.scale, axes + one, torch.float32, ratios=ratios, made_up=Scales(RANDOM)),
        )

    def unit(self, inputs: Shard) -> int:
        """Inputs of a scale, as the rank's cuts leave them."""
        return math.gcd(self.inputs, inputs.start, inputs.width) or 1

    def decode(self, layer: Part | Stacked) -> Floats:
        """The floats of a linear or a stack: a scale for each output and each `unit` of this rank's inputs."""
        table: Tensor = layer.get_parameter(self.scale).data
        if layer.fields[1].axes[-1] == "o":
            table = table.unsqueeze(-1)
        rows, at = [], 0
        for shard, source in zip(layer.outputs, layer.sources, strict=True):
            count = stored_width(layer.fields[1], "o", shard, source)
            part, first = table[..., at : at + count, :], source.start + shard.start
            block = self.outputs or max(shard.width, 1)
            part = part.repeat_interleave(block, -2)
            rows.append(part.narrow(-2, first % block if self.outputs else 0, shard.width))
            at += count
        scales, (size, start, width) = torch.cat(rows, -2), (layer.inputs.size, layer.inputs.start, layer.inputs.width)
        unit, block = self.unit(layer.inputs), self.inputs or size
        if self.inputs:
            scales = scales.repeat_interleave(block // unit, -1).narrow(-1, start % block // unit, width // unit)
        else:
            scales = scales.expand(*scales.shape[:-1], width // unit)
        return floats.pack(layer.get_parameter("weight").data, scales)


class ExpertStack(StoredStack):
    """All experts of a layer."""

    def __init__(self, scheme: Scheme):
        self.scheme, self.fields = scheme, scheme.fields("e")

    def becomes_plain(self, layer: Stacked, device: torch.device) -> bool:
        """Whether GPUs have no kernels for gate, up or down: one's outputs are the other's inputs."""
        shards = layer.inputs, *layer.outputs
        return device.type == "cuda" and not all(
            floats.in_packed_tiles(one.width, self.scheme.unit(one)) for one in shards
        )

    def kept_bits(self, layer: Stacked, device: torch.device) -> float:
        if self.becomes_plain(layer, device):
            return 0
        filled = padded(layer.width) / max(layer.width, 1)
        return floats.kept_bits(layer.inputs.width, self.scheme.unit(layer.inputs), device) * filled

    def make(self, layer: Stacked) -> Matrices:
        made = floats.pack(*map(layer.in_order, self.scheme.decode(layer)))
        if self.becomes_plain(layer, made.codes.device):
            return made.plain(layer.model_dtype)
        experts, outputs, inputs = made.shape
        at_once = max(1, AT_ONCE // max(1, outputs * inputs))

        def some(index: int) -> list[Tensor]:
            first = index * at_once
            return [one[first : first + at_once].flatten(0, 1) for one in made]

        return stack(self.scheme.codec, some, (experts, outputs, inputs), at_once)


class Part(StoredPart):
    """A linear's outputs: codes of 8 bits, which the model's dtype is made of where they are multiplied."""

    def __init__(self, scheme: Scheme, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]):
        super().__init__(scheme.fields(), inputs, outputs, bias, sources)
        self.scheme = scheme

    def kept_bits(self, device: torch.device) -> float:
        return floats.kept_bits(self.inputs.width, self.scheme.unit(self.inputs), device)

    def finish(self) -> None:
        made = self.scheme.decode(self)
        self.drop()
        if self.kept_bits(made.codes.device):
            self.hold(self.scheme.codec.pack(*made))
        else:
            self.hold(Halves(made.dequantize(self.model_dtype, 0, made.outputs)))


def block_of(size: object, key: str) -> tuple[int, int]:
    """Outputs and inputs of a block, by a list of two in config.json, or a text such as 128x128."""
    if isinstance(size, str) and re.fullmatch(r"\d+x\d+", size):
        size = [int(one) for one in size.split("x")]
    if isinstance(size, list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size):
        return size[0], size[1]
    raise FatalError(f"config.json: quantization_config has {key} {size!r}, expected two numbers", MODEL)


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Format | None:
    check_settings(settings, fmt=(None, "e4m3", "float8_e4m3fn"), expert_dtype=(None, "fp8", "fp4"))
    if settings.get("expert_dtype") == "fp4" and ".experts." in path:
        return mxfp4.Scheme(apart=True)
    size = settings.get("weight_block_size")
    if size is not None:
        name = "scale" if f"{path}.scale" in names else "weight_scale_inv"
        scheme = Scheme(name, *block_of(size, "weight_block_size"))
    else:  # transformers names one scale of a tensor as it names those of blocks
        inverse = f"{path}.weight_scale_inv" in names
        scheme = Scheme("weight_scale_inv" if inverse else "weight_scale", 0, 0)
    return scheme if is_stored(path, scheme.scale, names) else None
