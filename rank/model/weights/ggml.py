"""Dequantises blocks of ggml's types, as GGUF files hold them, for layers that do not take them as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.quantized import packing_cpu
from ...gguf.types import BY_NAME

CHUNK = 1 << 22  # elements that are dequantised at once: what that takes is small beside a matrix
# Types that gguf-py dequantises.
CODECS = {
    name: BY_NAME[name]
    for name in (
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S",
        "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
    )
}  # fmt: skip


def dequantize(type: str, data: Tensor) -> Tensor:
    """Blocks uint8 [..., bytes], whole groups → f32 [..., elements]."""
    codec, lines = CODECS[type], data.reshape(-1, data.shape[-1])
    supers = data.shape[-1] // codec.bytes
    width = supers * codec.group
    if packing_cpu.dequantizes(type.lower(), lines):
        return packing_cpu.dequantize(type.lower(), lines, supers, width).view(*data.shape[:-1], width)
    import gguf  # here: it takes a fifth of a second, and most models are not of GGUF files

    number = gguf.GGMLQuantizationType[type]
    found = torch.empty(len(lines), width, dtype=torch.float32)
    each = max(1, CHUNK // max(width, 1))
    for first in range(0, len(lines), each):
        part = lines[first : first + each].numpy()
        found[first : first + each] = torch.from_numpy(gguf.quants.dequantize(part, number))
    return found.view(*data.shape[:-1], width)
