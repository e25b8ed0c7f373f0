"""How rounded matrices are stored: the tensors and the quantization_config of GPTQ and AWQ checkpoints.

The layouts are described where they are read: rank/model/stored_formats/gptq.py and awq.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..stored_formats import awq
from .gptq import Rounded, Scheme

PACKED = 32  # bits of an entry


def gptq_tensors(matrix: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    return {
        "qweight": pack(matrix.codes.t(), scheme.bits).contiguous(),
        # As they are stored, zero points are one less: those of 0 wrap around.
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


LAYOUTS = {"gptq": (gptq_tensors, gptq_config), "awq": (awq_tensors, awq_config)}


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
