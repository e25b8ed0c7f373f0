"""Stacks in the forms that kernels for CPUs read, made into those of kernels for GPUs: by torch, wherever they lie.

Experts in host memory lie there as CPUs read them, and cross PCIe so. No number is decoded: bytes and nibbles change
places. Forms that are the same on both, or that torch dequantises on both, stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import (
    affine,
    e4m3,
    e4m3_cpu,
    e4m3_cuda,
    e4m3_wide,
    floats,
    int4_cpu,
    int4_cuda,
    mxfp4,
    mxfp4_cpu,
    mxfp4_cuda,
    pieces_cuda,
    q8_0,
    q8_0_cpu,
    q8_0_cuda,
    super_blocks,
    super_blocks_cpu,
    super_blocks_cuda,
)  # fmt: skip
from .floats import Floats
from .stack import Stack, padded

CHUNK = 16 << 20  # bytes that are made over at once: what that takes beside them is a few times as much


class Parts(NamedTuple):
    """What lies in memory of a stack of E experts, and how to put a stack together of other memory."""

    tensors: list[Tensor]  # [E, ...] each
    stack: Any

    @property
    def key(self) -> Hashable:
        """Equal of stacks whose experts look alike."""
        packed = self.stack.packed if isinstance(self.stack, Stack) else ()
        rest = tuple(one for one in packed if not isinstance(one, Tensor | int))  # without the number of outputs
        shapes = tuple((*x.shape[1:], x.dtype) for x in self.tensors)
        return type(self.stack), type(packed), shapes, rest

    def of(self, tensors: list[Tensor]) -> Any:
        """A stack like this one of tensors [n, ...]."""
        if isinstance(self.stack, Tensor):
            return tensors[0]
        if isinstance(self.stack, Floats):
            return Floats(*tensors)
        (_, outputs, inputs), packed, count = self.stack.shape, self.stack.packed, len(tensors[0])
        rest = iter(tensors)
        made = type(packed)(*(next(rest).flatten(0, 1) if isinstance(one, Tensor) else one for one in packed))
        if "outputs" in made._fields:
            made = made._replace(outputs=count * padded(outputs))
        return Stack(self.stack.codec, made, (count, outputs, inputs))


def parts(stack: Any) -> Parts:
    """Of a stack that is plain or quantised, with one expert or more."""
    if isinstance(stack, Tensor):
        return Parts([stack], stack)
    if isinstance(stack, Floats):
        return Parts(list(stack), stack)
    return Parts([one.unflatten(0, (stack.shape[0], -1)) for one in stack.tensors], stack)


def supports(stack: Any) -> bool:
    """Whether `of_gpu` takes it; else it has to be dequantised first."""
    packed = stack.packed if isinstance(stack, Stack) else None
    return not isinstance(packed, super_blocks_cpu.Packed) or super_blocks_cuda.takes(packed.inputs, packed.form)


def of_gpu(stack: Any) -> Any:
    """The same weights [E, O, I] for GPUs. Small beside the memory that it takes meanwhile: see CHUNK."""
    packed = stack.packed if isinstance(stack, Stack) else None
    codec: object
    if isinstance(packed, q8_0_cpu.Packed):
        codec, made = q8_0, pieces_cuda.Packed(_q8_0(packed.blocks), packed.outputs, q8_0_cuda.LAYOUT)
    elif isinstance(packed, super_blocks_cpu.Packed):
        assert supports(stack), "supports() was not asked"
        layout = super_blocks_cuda.layout(packed.form)
        codec, made = super_blocks, pieces_cuda.Packed(_super_blocks(packed), packed.outputs, layout)
    elif isinstance(packed, int4_cpu.Packed):
        codec, made = affine, _int4(packed)
    elif isinstance(packed, mxfp4_cpu.Packed):
        if not mxfp4_cuda.takes(packed.inputs):
            experts, outputs, _ = stack.shape
            whole = [one.unflatten(0, (experts, padded(outputs)))[:, :outputs] for one in mxfp4_cpu.unpack(packed)]
            return floats.pack(*whole)
        codec, made = mxfp4, pieces_cuda.Packed(_mxfp4(packed.blocks), packed.outputs, mxfp4_cuda.LAYOUT)
    elif isinstance(packed, e4m3_cpu.Packed):
        if not floats.in_pieces(packed.inputs, packed.unit):
            return _floats(stack)
        codec, made = e4m3, _e4m3(packed)
    else:
        return stack
    return Stack(cast(Any, codec), made, stack.shape)


# An input of 32 is s, e, t, b, from the highest bit on: of 2, 2, 4 and 2; t is t1, t0. An output of 16 is h, g, of 2
# and 8. CPUs keep fours of inputs s e t1 | t0 b.


@functools.cache
def _q8_0_order(device: torch.device) -> Tensor:
    """Which bytes of a block for CPUs a piece has, in its order."""
    codes = torch.arange(32, 544, device=device).view(2, 2, 2, 2, 8, 2, 2)  # s e t1 h g t0 b
    scales = torch.arange(32, device=device).view(2, 8, 2).transpose(0, 1)
    return torch.cat((codes.permute(4, 2, 5, 0, 3, 6, 1).flatten(), scales.flatten()))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks.index_select(2, _q8_0_order(blocks.device))


def _super_blocks(packed: super_blocks_cpu.Packed) -> Tensor:
    blocks, form = packed.blocks, packed.form
    strips, supers, size = blocks.shape
    pieces, groups, kinds = supers * form.super // 64, 32 // form.group, 1 + form.minima
    factors = blocks[..., : super_blocks_cpu.FACTORS].contiguous().view(torch.float16).view(strips, supers, 2, 2, 8)
    if form.super > 32:
        factors = factors.repeat_interleave(form.super // 64, 1).unsqueeze(2)
    else:
        factors = factors.unflatten(1, (pieces, 2))
    factors = factors[:, :, :, :kinds].permute(0, 1, 3, 2, 5, 4)  # strip piece kind super-block g h
    runs = blocks[..., super_blocks_cpu.FACTORS :].view(strips, supers, form.super // 32, -1)
    runs = runs.reshape(strips, pieces, 2, -1)
    of_numbers = 2 * super_blocks_cpu.BLOCK * groups
    numbers = runs[..., :of_numbers].reshape(strips, pieces, 2 * groups, 2, 16)[:, :, :, :kinds] ^ 128
    pairs = numbers.reshape(strips, pieces, -1, 2, 2, 8).permute(0, 1, 2, 5, 3, 4)  # strip piece pair g second h
    codes = runs[..., of_numbers:]
    if form.bits < 8:
        words = _words(codes[..., :256])
        if form.bits == 6:
            words = torch.cat((words.reshape(strips, pieces, -1), _upper(codes[..., 256:])), 2)
    else:
        of = codes.reshape(strips, pieces, 2, 2, 2, 2, 2, 8, 2, 2)  # strip piece run s e t1 h g t0 b
        words = of.permute(0, 1, 2, 7, 5, 8, 3, 6, 9, 4)
    made = (words, factors.contiguous().view(torch.uint8), pairs)
    return torch.cat([one.reshape(strips, pieces, -1) for one in made], 2)


def _words(codes: Tensor) -> Tensor:
    """Codes of 4 bits [strips, pieces, runs of 32 inputs, 256] in the order that pieces of 64 inputs have."""
    of = codes.reshape(*codes.shape[:2], 2, 2, 2, 2, 8, 2, 2)  # strip piece run e t1 h g t0 b
    low, high = of[:, :, :, :, :, 0], of[:, :, :, :, :, 1]  # strip piece run e t1 g t0 b
    both = torch.stack((low & 15 | high << 4, low >> 4 | high & 240), 3)  # strip piece run s e t1 g t0 b
    return both.permute(0, 1, 6, 5, 7, 2, 3, 8, 4)


def _upper(codes: Tensor) -> Tensor:
    """The same of the upper 2 bits of codes [strips, pieces, runs of 32 inputs, 128]. Pairs of them stay together."""
    of = codes.reshape(*codes.shape[:2], 2, 2, 2, 8, 2, 2)  # strip piece run e h g t0 b
    low, high = of[:, :, :, :, 0], of[:, :, :, :, 1]  # strip piece run e g t0 b
    both = torch.stack((low & 15 | high << 4, low >> 4 | high & 240), 4)  # strip piece run e t1 g t0 b
    return both.permute(0, 1, 5, 4, 6, 2, 7, 3).reshape(*codes.shape[:2], -1)


def _int4(packed: int4_cpu.Packed) -> pieces_cuda.Packed:
    strips, pieces, head = len(packed.blocks), packed.inputs // int4_cuda.INPUTS, int4_cpu.head_bytes(packed.zeros)
    scaled = int4_cuda.INPUTS if packed.group % int4_cuda.INPUTS == 0 else 32
    tables = [packed.blocks[..., :32].contiguous().view(torch.float16)]
    if packed.zeros:
        tables.append(packed.blocks[..., 32:head])
    made = [_words(packed.blocks[..., head:].reshape(strips, pieces, 2, -1))]
    for one in tables:
        each = one.repeat_interleave(packed.group // scaled, 1).view(strips, pieces, -1, 2, 8)  # of groups h g
        made.append(each.mT.contiguous().view(torch.uint8))
    whole = torch.cat([one.reshape(strips, pieces, -1) for one in made], 2)
    return pieces_cuda.Packed(whole, packed.outputs, int4_cuda.layout(scaled, packed.zeros))


def _mxfp4(blocks: Tensor) -> Tensor:
    strips, groups, _ = blocks.shape
    pairs = blocks.view(strips, groups // 2, 2, -1)  # groups of a piece
    scales = pairs[..., :16].unflatten(3, (2, 8)).permute(0, 1, 4, 2, 3)  # strip piece g group h
    made = _words(pairs[..., 16:]), scales
    return torch.cat([one.reshape(strips, groups // 2, -1) for one in made], 2)


def _e4m3(packed: e4m3_cpu.Packed) -> pieces_cuda.Packed:
    strips, inputs, _ = packed.codes.shape
    wide = e4m3_wide.takes(inputs, packed.unit)
    group = e4m3_wide.GROUP if wide else e4m3_cuda.GROUP
    codes = packed.codes.view(strips, inputs // group, group // 16, 2, 4, 2, 2, 8)  # strip group run e t b h g
    scales = packed.scales.repeat_interleave(packed.unit // group, 1).unflatten(2, (2, 8))  # strip group h g
    if wide:
        of_half = codes.permute(0, 1, 6, 2, 7, 4, 5, 3).reshape(strips, -1, 2, e4m3_wide.CODES)
        made = torch.cat((of_half, scales.contiguous().view(torch.uint8)), 3).flatten(2)
        return pieces_cuda.Packed(made, packed.outputs, e4m3_wide.layout(packed.unit))
    each = codes.permute(0, 1, 7, 4, 2, 6, 5, 3), scales.mT.contiguous().view(torch.uint8)
    made = torch.cat([one.reshape(strips, inputs // group, -1) for one in each], 2)
    return pieces_cuda.Packed(made, packed.outputs, e4m3_cuda.LAYOUT)


def _floats(stack: Stack) -> Floats:
    experts, outputs, _ = stack.shape
    whole = [one.mT.reshape(experts, padded(outputs), -1)[:, :outputs] for one in stack.tensors]
    return floats.pack(*whole)
