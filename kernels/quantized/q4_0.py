"""Q4_0, a format of ggml's: codes of 4 bits; 32 inputs share an f16 scale. They are kept as GPTQ's of groups of 32."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .. import jit
from ..cpp import ops
from ..device import DeviceCaps
from . import affine, block_bits, group_encoder, int4_cuda, super_blocks, super_blocks_cpu, target
from .super_blocks import Decoded
from .super_blocks_form import Form

FORM = Form(super=32, group=32, bits=4, zero=8, bytes=18, minima=False, encoder="q4_0")
GROUP = FORM.super
Packed = affine.Packed | super_blocks.Packed


def decode(blocks: Tensor) -> Decoded:
    """blocks uint8 [O, S, 18]."""
    factors, codes = blocks.split((2, 16), -1)
    ones = torch.ones(blocks.shape[:2], dtype=torch.int8, device=blocks.device)
    factors = block_bits.f16(factors).expand(*factors.shape[:2], 2)
    return Decoded(block_bits.fields(codes, 4).flatten(1), factors, ones, torch.zeros_like(ones))


def encode_groups(groups: Tensor) -> Tensor:
    """f32 [O, S, 1, 32] → blocks [O, S, 18]."""
    factors, codes = group_encoder.centred(groups.squeeze(2), FORM.zero)
    return block_bits.joined(factors, block_bits.join(codes.unflatten(-1, (2, 16)), 4))


encode = functools.partial(super_blocks.encode, FORM, encode_groups)  # as gguf-py, bit for bit
from_blocks = super_blocks.from_blocks


def pack(blocks: Tensor) -> Packed:
    """What `linear` likes best on the device that reads it (target.py)."""
    if target.of(blocks) != "cuda" and not _as_int4(blocks.shape[1] // FORM.bytes * GROUP):
        return super_blocks.pack(FORM, decode, blocks)
    codes, factors, ones, _ = decode(blocks.contiguous().view(len(blocks), -1, FORM.bytes))
    return affine.pack(codes, factors[..., 0].float(), FORM.zero * ones.short())


def _as_int4(inputs: int) -> bool:
    """Whether CPUs have them so, too: in less memory than super-blocks."""
    return inputs % int4_cuda.INPUTS == 0 and ops.available()


def kept_bits(inputs: int, device: torch.device) -> float:
    """What `pack` keeps of a weight with its share of its group's scale."""
    if device.type == "cuda" or _as_int4(inputs):
        return affine.kept_bits(FORM.bits, GROUP, inputs, True, device)
    return super_blocks.kept_bits(FORM, inputs, device)


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]: exact in f32, rounded once in 16 bits."""
    if isinstance(packed, super_blocks.Plain | super_blocks_cpu.Packed):
        return super_blocks.dequantize(packed, dtype, first, last)
    return affine.dequantize(packed, dtype, first, last)


def linear(x: Tensor, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O]: [T, O]; gated or not, as `affine.linear`."""
    if isinstance(packed, super_blocks.Plain | super_blocks_cpu.Packed):
        return super_blocks.linear(x, packed, gate, bias)
    return affine.linear(x, packed, gate, bias)


def variants(
    rows: Iterable[int], packed: Packed, dtype: torch.dtype, gate: str, bias: bool, found: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """What `linear` of so many rows, each, is compiled as on this GPU."""
    if not isinstance(packed, super_blocks.Plain | super_blocks_cpu.Packed):
        yield from affine.variants(rows, packed, dtype, gate, bias, found)
