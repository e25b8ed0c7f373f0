"""How rounded matrices are stored: the tensors and the quantization_config of GPTQ, AWQ and Marlin checkpoints.

The layouts are described where they are read: rank/model/stored_formats/gptq.py, awq.py and marlin.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..model.stored_formats import awq, marlin
from .gptq import Rounded, Scheme

PACKED = 32  # bits of an entry


def gptq_tensors(matrix: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    return {
        "qweight": pack(matrix.codes.t(), scheme.bits).contiguous(),
        # Zero points are stored one less: those of 0 wrap around.
        "qzeros": pack((matrix.zeros.t().short() - 1) & scheme.most, scheme.bits, along=1),
        "scales": matrix.scales.t().to(torch.float16).contiguous(),
        "g_idx": matrix.groups.clone(),
    }


def gptq_config(scheme: Scheme) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group or -1,
        "sym": scheme.symmetric,
        "desc_act": scheme.ordered,
        "checkpoint_format": "gptq",
    }


def awq_tensors(matrix: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    return {
        "qweight": pack(_interleaved(matrix.codes.t()), scheme.bits, along=1),
        "qzeros": pack(_interleaved(matrix.zeros.t()), scheme.bits, along=1),
        "scales": matrix.scales.t().to(torch.float16).contiguous(),
    }


def awq_config(scheme: Scheme) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": scheme.bits,
        "group_size": scheme.group or -1,
        "zero_point": True,
        "version": "gemm",
    }


def marlin_tensors(matrix: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    outputs, inputs = matrix.codes.shape
    scales = matrix.scales.t().to(torch.float16)
    return {
        "B": pack(codes_for_threads(matrix.codes.t()), scheme.bits, along=1),
        "s": marlin.scales_in_order(scales, scheme.group in (0, inputs)).contiguous(),
        "workspace": torch.zeros(outputs // 128 * 16, dtype=torch.int32),
    }


def marlin_config(scheme: Scheme) -> dict[str, Any]:
    return gptq_config(scheme) | {"checkpoint_format": "marlin", "is_marlin_format": True}


def listed(paths: list[str], merged: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {"modules_to_not_convert": paths}


def listed_and_dynamic(paths: list[str], merged: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """GPTQModel and vLLM read `dynamic`: rules by patterns, of which those after `-:` name modules that stay plain.
    vLLM asks for a merged linear by its own name, so it has a rule where all its parts have."""
    found = dict.fromkeys(paths)
    for path in paths:
        parent, _, name = path.rpartition(".")
        for whole, parts in merged.items():
            if name == parts[-1] and {f"{parent}.{part}" for part in parts} <= found.keys():
                found[f"{parent}.{whole}"] = None
    return listed(paths, merged) | {"dynamic": {f"-:^{re.escape(path)}$": {} for path in found}}


class Layout(NamedTuple):
    """How a checkpoint stores what is rounded."""

    tensors: Callable[[Rounded, Scheme], dict[str, Tensor]]  # of a linear, by the ends of their names
    settings: Callable[[Scheme], dict[str, Any]]  # quantization_config
    left_out: Callable[[list[str], Mapping[str, Sequence[str]]], dict[str, Any]]  # its keys for modules that stay plain
    outputs: int = 32  # of which linears have a multiple; others stay plain
    inputs: int = 32


LAYOUTS = {
    "gptq": Layout(gptq_tensors, gptq_config, listed_and_dynamic),
    "awq": Layout(awq_tensors, awq_config, listed),
    "marlin": Layout(marlin_tensors, marlin_config, listed_and_dynamic, outputs=64, inputs=128),
}


def pack(codes: Tensor, bits: int, along: int = 0) -> Tensor:
    """Codes [R, C] → int32, of which each holds 32 / bits neighbours of a column (along 0) or a row (1), the first in
    the lowest bits."""
    if along == 0:
        return pack(codes.t(), bits, 1).t()
    each = PACKED // bits
    shifts = torch.arange(0, PACKED, bits, device=codes.device)
    wide = (codes.to(torch.int64).unflatten(1, (-1, each)) << shifts).sum(2)
    return (wide - (wide >> 31 << 32)).to(torch.int32).contiguous()


def _interleaved(codes: Tensor) -> Tensor:
    """Each eight neighbours in AWQ's order."""
    return codes.unflatten(1, (-1, 8))[..., list(awq.ORDER)].flatten(1)


def codes_for_threads(codes: Tensor) -> Tensor:
    """The reverse of `marlin.codes_in_order`: uint8 [I, O] → uint8 [I / 16, 16 O], eight of each entry, the one of the
    lowest bits first."""
    tiles = codes.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).transpose(1, 2)
    tiles = tiles.reshape(-1, 4, 2, 4, 2, 2, 8).permute(0, 6, 3, 1, 5, 2, 4)
    return tiles.reshape(-1, 8)[:, list(marlin.ORDER)].view(len(codes) // 16, -1)
