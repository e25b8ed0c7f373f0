"""ggml's types with scales of two levels: Q4_0, Q4_1, Q5_1, Q2_K to Q6_K and IQ4_XS.

A weight is (code - zero) * scale - minimum. Groups of 16 or 32 inputs have a scale and a minimum, whole numbers of
8 bits times two f16 numbers of their super-block of 32 or 256 inputs. All this is kept, so what is multiplied is what
gguf-py's quants.py dequantises, bit for bit in f32. Codes have 4, 6 or 8 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from . import (
    blocks_cpu,
    dequantize_pieces,
    group_encoder,
    panels,
    pieces_cuda,
    scale_search,
    super_blocks_cpu,
    super_blocks_cuda,
    target,
)
from .super_blocks_form import Form

CHUNK = 1 << 23  # elements that are decoded or encoded at once: what that takes is small beside a matrix
CPU_CHUNK = 1 << 18  # that torch encodes on CPUs at once: they stay in a cache


class Decoded(NamedTuple):
    """A weight [O, I], or some outputs of one. Of S super-blocks and G groups."""

    codes: Tensor  # uint8 [O, I]
    factors: Tensor  # f16 [O, S, 2], of scales and of minima
    scales: Tensor  # int8 [O, G]
    minima: Tensor  # int8 [O, G]


class Plain(NamedTuple):
    """Where no kernel takes another layout: ggml's own blocks."""

    blocks: Tensor  # uint8 [O, I / super * bytes]
    form: Form
    decode: Callable[[Tensor], Decoded]

    @property
    def outputs(self) -> int:
        return len(self.blocks)


Packed = Plain | super_blocks_cpu.Packed | pieces_cuda.Packed


def encode(form: Form, encode_groups: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[Tensor]:
    """weight [O, I] of any float dtype → ggml's blocks uint8 [O, I / super * bytes].

    encode_groups: from f32 [O, super-blocks, groups, group] to uint8 [O, super-blocks, bytes].
    """
    outputs, inputs = weight.shape
    shape = inputs // form.super, form.super // form.group, form.group
    blocks = weight.new_empty(outputs, shape[0] * form.bytes, dtype=torch.uint8)
    if form.encoder and ops.reads(weight):
        fill = scale_search.encode if form.super > form.group else group_encoder.encode
        fill(form, weight, blocks)
        return (blocks,)
    rows = max(1, (CHUNK if weight.is_cuda else CPU_CHUNK) // max(inputs, 1))
    for first in range(0, outputs, rows):
        part = weight[first : first + rows].float()
        blocks[first : first + rows] = encode_groups(part.reshape(len(part), *shape)).flatten(1)
    return (blocks,)


def from_blocks(blocks: Tensor) -> tuple[Tensor]:
    """blocks uint8 [O, bytes], as ggml's files hold them: they are kept for `pack`."""
    return (blocks,)


def pack(form: Form, decode: Callable[[Tensor], Decoded], blocks: Tensor) -> Packed:
    """What `linear` likes best on the device that reads it (target.py).

    decode: of super-blocks, uint8 [..., form.bytes].
    """
    outputs, inputs = len(blocks), blocks.shape[1] // form.bytes * form.super
    if target.of(blocks) == "cuda" and super_blocks_cuda.takes(inputs, form):
        layout = super_blocks_cuda.layout(form)
        parts = [super_blocks_cuda.pack(*one, form) for one in _decoded(blocks, form, decode)]
        return pieces_cuda.Packed(torch.cat(parts), outputs, layout)
    if super_blocks_cpu.takes(blocks):
        parts = [super_blocks_cpu.pack(*one, form) for one in _decoded(blocks, form, decode)]
        return super_blocks_cpu.Packed(torch.cat(parts), outputs, form)
    return Plain(blocks, form, decode)


def _decoded(blocks: Tensor, form: Form, decode: Callable[[Tensor], Decoded]) -> Iterator[Decoded]:
    """By so many outputs as a chunk has, a multiple of 16."""
    width = blocks.shape[1] // form.bytes * form.super
    for part in blocks.split(max(16, CHUNK // max(width, 1) // 16 * 16)):
        yield decode(part.contiguous().view(len(part), -1, form.bytes))


def form_of(codec: object) -> Form | None:
    """A codec's form, where it packs weights into super-blocks: those have `decode`."""
    return getattr(codec, "FORM", None) if hasattr(codec, "decode") else None


def kept_bits(form: Form, inputs: int, device: torch.device) -> float:
    """What `pack` keeps of a weight with its share of the rest, as far as the sizes tell."""
    if device.type == "cuda" and super_blocks_cuda.takes(inputs, form):
        return super_blocks_cuda.layout(form).bytes / (2 * super_blocks_cuda.INPUTS)  # of sixteen outputs
    if device.type == "cpu" and super_blocks_cpu.available():
        return super_blocks_cpu.super_bytes(form) * 8 / (super_blocks_cpu.BLOCK * form.super)
    return form.bytes * 8 / form.super


def weights(decoded: Decoded, form: Form) -> Tensor:
    """f32 [O, I], as gguf-py computes them."""
    codes, factors, scales, minima = decoded
    each = form.super // form.group
    of_scales, of_minima = (factors[..., i].float().repeat_interleave(each, 1) for i in (0, 1))
    groups = codes.view(*scales.shape, form.group).float() - form.zero
    groups *= (of_scales * scales).unsqueeze(2)
    groups -= (of_minima * minima).unsqueeze(2)
    return groups.view(codes.shape)


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32, first: int = 0, last: int | None = None) -> Tensor:
    """Outputs first to last of the weight, [last - first, I]: computed in f32, rounded once in 16 bits.

    first: a multiple of 16.
    """
    last = packed.outputs if last is None else min(last, packed.outputs)
    if isinstance(packed, super_blocks_cpu.Packed):
        return blocks_cpu.dequantize(packed.of_blocks, dtype, first, last)
    if isinstance(packed, pieces_cuda.Packed):
        part = packed.part(first, last)
        if dtype != torch.float32:
            return dequantize_pieces.dequantize(part, dtype)
        form, *decoded = super_blocks_cuda.unpack(part)
        return weights(Decoded(*decoded), form)
    some = packed.blocks[first:last]
    made = [weights(one, packed.form).to(dtype) for one in _decoded(some, packed.form, packed.decode)]
    return torch.cat(made)


linear = functools.partial(panels.linear, dequantize)
variants = pieces_cuda.variants  # what `linear` is compiled as on a GPU
