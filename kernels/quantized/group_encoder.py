"""Groups of 32 weights rounded to codes of 4 and 5 bits as gguf-py does, bit for bit: Q4_0, Q4_1, Q5_0 and Q5_1."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import ops
from .super_blocks_form import Form

GROUP = 32


def encode(form: Form, weight: Tensor, blocks: Tensor) -> None:
    """Fill ggml's blocks of a weight [O, I], where `ops.reads` takes that."""
    ops.typed("group_encoder", f"encode_{form.encoder}", weight.dtype)(weight, blocks, weight.numel() // GROUP)


def encode_signed_q5_0(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Q5_0 in the form of Q8_0, likewise: codes int8 [O, I] around 0, and scales f16 [O, I / 32], none below 0."""
    codes = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty(len(weight), weight.shape[1] // GROUP, dtype=torch.float16)
    ops.typed("group_encoder", "encode_signed_q5_0", weight.dtype)(weight, codes, scales, scales.numel())
    return codes, scales


def centred(groups: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """f32 [..., n] → scales f16 [..., 1], with which the largest becomes -middle, and codes uint8 more by `middle`.

    Rounded as gguf-py does, which is to the nearest in f32, halves up.
    """
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = largest / torch.full((), -float(middle), device=groups.device)  # no multiplication by the reciprocal
    inverse = torch.where(scales == 0, 0, 1 / scales)
    codes = ((groups * inverse) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1)
    return scales.to(torch.float16), codes.to(torch.uint8)


def spanned(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """f32 [..., n] → f16 [..., 2], scales and smallest, and codes uint8 from 0 to most; rounded as gguf-py does."""
    low = groups.amin(-1, keepdim=True)
    scales = (groups.amax(-1, keepdim=True) - low) / torch.full((), float(most), device=groups.device)
    inverse = torch.where(scales == 0, 0, 1 / scales)
    codes = ((groups - low) * inverse + 0.5).trunc().clamp(0, most)
    return torch.cat((scales, low), -1).to(torch.float16), codes.to(torch.uint8)
