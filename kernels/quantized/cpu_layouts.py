"""Packed layouts on CPUs: blocks of 16 outputs by the inputs of a group or super-block (kernels/cpp/blocks.h).

A block's head is what its inputs share; then comes each 32 inputs' part. C++ packs codes and what files hold
(packing_cpu.cpp); torch makes the same bytes on a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpp import ops
from . import packing_cpu
from .codec import SuperBlock
from .ggml_types import Decoded
from .packed_layouts import N_TILE, ZERO, Table, Tables

RUN = 32  # inputs whose codes lie together


@dataclass(frozen=True, slots=True)
class Layout:
    """How blocks of a format look to their operations. Equal by value: threads may make the same one twice."""

    source: str  # the operations' file
    name: str  # what their names begin with
    inputs: int  # of a block
    zero: int  # what all codes have too much
    tables: Tables
    form: SuperBlock | None = None  # of super-blocks

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return self.tables.bytes

    @property
    def bits(self) -> float:
        """Bits of a weight, with its share of the rest."""
        return self.bytes * 8 / (N_TILE * self.inputs)


class Packed(NamedTuple):
    """A weight [O, I] in blocks of 16 outputs, the last one filled up with zeros."""

    blocks: Tensor  # uint8 [ceil(O / 16), I / layout.inputs, layout.bytes]
    outputs: int
    layout: Layout

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] * self.layout.inputs

    def dequantize(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        """Outputs first to last of the weight, [last - first, I]; first is a block's."""
        made = dtype if dtype in ops.SUFFIXES else torch.float32
        y = self.blocks.new_empty(last - first, self.inputs, dtype=made)
        source, name, inputs, zero = self.layout.source, self.layout.name, self.layout.inputs, self.layout.zero
        blocks = self.blocks[first // N_TILE :]
        ops.typed(source, f"{name}_dequantize", made)(blocks, y, self.inputs, last - first, inputs, zero)
        return y.to(dtype)


def pack(layout: Layout, codes: Tensor, **tables: Tensor) -> Packed:
    """Numbers [O, N] by the names of the layout's tables: by C++ the codes, where that reads them."""
    (table, *others), head = layout.tables.repeated, layout.tables.head
    if others or not (packing_cpu.readable(codes) and ops.available()):
        return Packed(layout.tables.pack({"codes": codes, **tables}), len(codes), layout)
    shape = -(-len(codes) // N_TILE), codes.shape[1] // layout.inputs, layout.bytes
    blocks = codes.new_empty(shape, dtype=torch.uint8)
    first = 0
    for one in head:
        numbers = one.in_order(tables[one.name])
        blocks[..., first : first + one.bytes].view(numbers.dtype).copy_(numbers)
        first += one.bytes
    (outputs, inputs), (_, groups, group) = codes.shape, blocks.shape
    sizes = inputs // RUN // groups, table.bytes // layout.tables.times, group, groups * group, table.flipped
    op = ops.op(packing_cpu.SOURCE, "put_codes")
    op(codes, blocks.view(-1)[first:], outputs, inputs, table.bits, *sizes)
    return Packed(blocks, len(codes), layout)


def _codes(bits: int, runs: int, flipped: int = 0) -> Table:
    """Codes of 4 or 8 bits of so many times 32 inputs."""
    return Table("codes", bits, f"r{runs} n2 f4 i4", "r f h g i n" if bits == 4 else "r n f h g i", flipped=flipped)


Q8_0 = Layout("q8_0_cpu", "q8_0", RUN, 128, Tables((Table("scales", 16, "", "h g"),), (_codes(8, 1, flipped=128),)))
# zero: what C++ adds to twice a code's number.
MXFP4 = Layout("mxfp4_cpu", "mxfp4", RUN, 12, Tables((Table("scales", 8, "", "h g"),), (_codes(4, 1),)))


@functools.cache
def int4(group: int, zeros: bool) -> Layout:
    """group: inputs with one scale, a multiple of 32. zeros: whether zero points are stored."""
    head = Table("scales", 16, "", "h g"), Table("zeros", 8, "", "h g")
    name = "int4_zeros" if zeros else "int4"
    return Layout("int4_cpu", name, group, ZERO, Tables(head[: 1 + zeros], (_codes(4, group // RUN),)))


@functools.cache
def super_blocks(form: SuperBlock) -> Layout:
    """16 factors of scales and 16 of minima; of each 32 inputs the numbers of both, for each group, and the codes."""
    runs, groups = form.super // RUN, RUN // form.group
    numbers = Table("numbers", 8, f"r{runs} c{groups} k2", "r c k h g")
    upper = Table("codes", 2, f"r{runs} n2 p2 q2 i4", "r p h g i q n", shift=4)
    codes = (_codes(4, runs), upper) if form.bits == 6 else (_codes(form.bits, runs),)
    tables = Tables((Table("factors", 16, "k2", "k h g"),), (numbers, *codes))
    return Layout("super_blocks_cpu", f"super_blocks_{form.bits}_{groups}", form.super, form.zero, tables, form)


def pack_super_blocks(decoded: Decoded, form: SuperBlock) -> Packed:
    codes, factors, scales, minima = decoded
    numbers = torch.stack((scales, minima), 2).view(torch.uint8).flatten(1)
    return pack(super_blocks(form), codes, factors=factors.flatten(1), numbers=numbers)


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor, stored_zeros: bool = False) -> Packed:
    """Codes [O, I] uint8 below 16, scales [O, G] that f16 holds and zeros [O, G] up to 127.

    Groups have a multiple of 32 inputs. stored_zeros: also where all are ZERO.
    """
    stored = stored_zeros or bool(((zeros != ZERO) & (scales != 0)).any())  # outputs that fill up have neither
    layout = int4(codes.shape[1] // scales.shape[1], stored)
    return pack(layout, codes, scales=scales.to(torch.float16), zeros=zeros.to(torch.uint8))
