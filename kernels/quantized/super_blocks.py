"""Codecs of ggml's types that are packed into super-blocks: Q4_0, Q4_1, Q5_1, Q2_K to Q6_K, IQ4_XS and
TQ2_0.

Codes of 4, 6 or 8 bits, whole numbers of 8 bits and f16 factors are kept as blocks have them, so what is multiplied is
what gguf-py's quants.py dequantises, bit for bit in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from . import affine, cpu_layouts, cuda_layouts, ggml_encoders, packed_gemm, packing_cpu, target
from .ggml_types import TYPES, Decoded, Type, weights

CHUNK = 1 << 23  # elements that are decoded at once: what that takes is small beside a matrix


class Plain(NamedTuple):
    """ggml's own blocks, where no kernel takes another layout."""

    blocks: Tensor  # uint8 [O, I / super * bytes]
    type: Type

    @property
    def outputs(self) -> int:
        return len(self.blocks)

    def dequantize(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        some = _decoded(self.blocks[first:last], self.type)
        return torch.cat([weights(one, self.type.form).to(dtype) for one in some])


class SuperBlocks:
    """The codec of one type."""

    def __init__(self, type: Type):
        self.type, self.name = type, type.name
        self.GROUP = type.form.super
        self.FORMS: tuple[Callable[..., Any], ...] = (self.pack,)

    def encode(self, weight: Tensor) -> tuple[Tensor]:
        """weight [O, I] of any float dtype → ggml's blocks uint8 [O, I / super * bytes]."""
        return (ggml_encoders.encode(self.type, weight),)

    def pack(self, blocks: Tensor) -> Any:
        """Pack blocks as `linear` reads them fastest on the device that will (target.py)."""
        form, type = self.type.form, self.type
        outputs, inputs = len(blocks), blocks.shape[1] // type.bytes * form.super
        if target.of(blocks) == "cuda" and cuda_layouts.takes_super_blocks(inputs, form):
            parts = [cuda_layouts.pack_super_blocks(one, form).tiles for one in _decoded(blocks, type)]
            return packed_gemm.Packed(torch.cat(parts), outputs, cuda_layouts.super_blocks(form))
        if target.of(blocks) == "cpu" and blocks.numel() and ops.available():
            layout = cpu_layouts.super_blocks(form)
            if packing_cpu.takes(blocks):
                made = packing_cpu.pack(self.name, blocks, inputs // form.super, layout.bytes)
            else:
                made = torch.cat([cpu_layouts.pack_super_blocks(one, form).blocks for one in _decoded(blocks, type)])
            return cpu_layouts.Packed(made, outputs, layout)
        return Plain(blocks, type)

    def kept_bits(self, inputs: int, device: torch.device) -> float:
        """Bits of a weight as `pack` keeps it there, with its share of the rest, as far as the sizes tell."""
        form = self.type.form
        if device.type == "cuda" and cuda_layouts.takes_super_blocks(inputs, form):
            return cuda_layouts.super_blocks(form).bits
        if device.type == "cpu" and ops.available():
            return cpu_layouts.super_blocks(form).bits
        return self.type.bytes * 8 / form.super


class Q4_0(SuperBlocks):
    """Q4_0 is kept as GPTQ's codes in groups of 32, where kernels take these: in less memory than super-blocks."""

    def pack(self, blocks: Tensor) -> Any:
        if target.of(blocks) != "cuda" and not ops.available():
            return super().pack(blocks)
        if packing_cpu.takes(blocks):
            layout = cpu_layouts.int4(self.GROUP, False)
            made = packing_cpu.pack(self.name, blocks, blocks.shape[1] // self.type.bytes, layout.bytes)
            return cpu_layouts.Packed(made, len(blocks), layout)
        codes, factors, ones, _ = self.type.decode(blocks.contiguous().view(len(blocks), -1, self.type.bytes))
        return affine.pack(codes, factors[..., 0].float(), self.type.form.zero * ones.short())

    def kept_bits(self, inputs: int, device: torch.device) -> float:
        if device.type == "cuda":
            return affine.kept_bits(4, self.GROUP, inputs, True, device)
        return cpu_layouts.int4(self.GROUP, False).bits if ops.available() else super().kept_bits(inputs, device)


def _decoded(blocks: Tensor, type: Type) -> Iterator[Decoded]:
    """Decodes chunk by chunk, each of a multiple of 16 outputs."""
    width = blocks.shape[1] // type.bytes * type.form.super
    for part in blocks.split(max(16, CHUNK // max(width, 1) // 16 * 16)):
        yield type.decode(part.contiguous().view(len(part), -1, type.bytes))


CODECS = {
    name: (Q4_0 if name == "q4_0" else SuperBlocks)(type) for name, type in TYPES.items() if not type.kept_as_q8_0
}
q2_k, q3_k, q4_k, q5_k, q6_k = (CODECS[f"q{bits}_k"] for bits in range(2, 7))
q4_0, q4_1, q5_1 = (CODECS[name] for name in ("q4_0", "q4_1", "q5_1"))
