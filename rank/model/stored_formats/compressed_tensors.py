"""compressed-tensors, as llm-compressor writes it (github.com/vllm-project/compressed-tensors), by its `format`:

pack-quantized: weight_packed int32 [O, I * bits / 32], codes of 4 or 8 bits along the inputs, lower bits first, each
more by half of their range than it means; weight_scale [O, groups]; weight_zero_point int32 [O * bits / 32, groups],
packed along the outputs in the same way, where weights are not symmetric.
int-quantized: weight int8 [O, I], weight_scale [O, 1]. float-quantized: the same in e4m3, or with a scale [1], or one
for each block. What becomes of activations does not follow config.json: docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....errors import MODEL, FatalError
from ....kernels.quantized import e4m3, e4m3_weight_only
from ..shard import Shard
from ..weights.slicing import Field, Ratio
from . import INSTEAD, fp8, is_among, is_stored
from ._part import GroupedFormat, GroupedPart, Grouping, check_settings, group_size, unpack

HARMLESS = (
    ".weight_shape", ".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
    ".weight_zero_point",  # zeros where weights are symmetric
)  # fmt: skip
FORMATS = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"


@dataclass(frozen=True)
class Scheme(GroupedFormat):
    packed: bool

    def fields(self, inputs: Shard) -> Sequence[Field]:
        bits, group, symmetric = self.grouping
        packs, grouped = Ratio(1, 32 // bits), Ratio(1, group, shared=True)
        fields = [
            Field("weight_packed", "oi", torch.int32, ratios={"i": packs}, made_up=self.grouping.codes)
            if self.packed
            else Field("weight", "oi", torch.int8),
            Field("weight_scale", "oi", torch.float32, ratios={"i": grouped}, made_up=self.grouping.scales),
        ]
        if not symmetric and self.packed:
            ratios, zeros = {"o": packs, "i": grouped}, self.grouping.zeros()
            fields.append(Field("weight_zero_point", "oi", torch.int32, ratios=ratios, made_up=zeros))
        elif not symmetric:
            fields.append(Field("weight_zero_point", "oi", torch.int8, ratios={"i": grouped}))
        return fields

    def decode(self, part: GroupedPart) -> tuple[Tensor, Tensor, Tensor]:
        bits, _, symmetric = self.grouping
        middle = 1 << bits - 1
        scales = part.spread(part.read("weight_scale"))
        if self.packed:
            codes = unpack(part.read("weight_packed"), bits)
        else:
            codes = (part.read("weight").short() + middle).to(torch.uint8)
        if symmetric:
            return codes, scales, torch.full(scales.shape, middle, dtype=torch.int16, device=codes.device)
        zeros = part.read("weight_zero_point")
        zeros = unpack(zeros.t(), bits).t().short() if self.packed else zeros.short() + middle
        return codes, scales, part.spread(zeros)


def match(settings: dict[str, Any], path: str, names: Collection[str]) -> Scheme | fp8.Scheme | None:
    group = next((one for one in _groups(settings) if _targets(one, path)), None)
    if group is None:
        return None
    _check_whole(settings)
    weights, kind = group.get("weights") or {}, group.get("format") or settings.get("format")
    check_settings({"format": kind}, format=FORMATS)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if weights.get("type") == "float":
        check_settings(weights, num_bits=(8,))
        codec = e4m3 if group.get("input_activations") else e4m3_weight_only
        scheme = fp8.Scheme("weight_scale", *_block(weights, strategy), codec)
        return scheme if is_stored(path, "weight_scale", names) else None
    packed = kind == "pack-quantized"
    check_settings(
        weights, type=(None, "int"), num_bits=(4, 8) if packed else (8,), actorder=(None, False, "weight", "static")
    )
    check_settings({"strategy": strategy}, strategy=("group", "channel"))
    size = group_size(weights, "group_size") if strategy == "group" else 0
    symmetric = weights.get("symmetric") is not False
    stored = is_stored(path, "weight_packed" if packed else "weight_scale", names)
    return Scheme(Grouping(weights["num_bits"], size, symmetric), packed) if stored else None


def _check_whole(settings: dict[str, Any]) -> None:
    """Raises FatalError where weights are more than their codes and scales: sparse, or of rotated inputs."""
    sparse = (settings.get("sparsity_config") or {}).get("format")
    rotated = (settings.get("transform_config") or {}).get("config_groups")
    for key, given in ("sparsity_config", sparse if sparse != "dense" else None), ("transform_config", rotated):
        if given:
            raise FatalError(
                f"config.json: quantization_config has a {key} of {given!r}, which is not supported: {INSTEAD}", MODEL
            )


def _groups(settings: dict[str, Any]) -> list[dict[str, Any]]:
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
        raise FatalError(f"config.json: quantization_config has config_groups {groups!r}, expected objects", MODEL)
    return list(groups.values())


def _targets(group: dict[str, Any], path: str) -> bool:
    targets = group.get("targets") or ["Linear"]
    return "Linear" in targets or is_among(path, targets)


def _block(weights: dict[str, Any], strategy: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale of weights in floating point."""
    check_settings({"strategy": strategy}, strategy=("tensor", "channel", "group", "block"))
    if strategy == "block":
        return fp8.block_of(weights.get("block_structure"), "block_structure")
    return {"tensor": (0, 0), "channel": (1, 0), "group": (1, group_size(weights, "group_size"))}[strategy]
