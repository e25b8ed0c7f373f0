"""Packed layouts on GPUs: tiles of 16 outputs in the order in which tensor cores take them from registers.

A lane gets its codes of a tile by one access, from memory or from shared memory, and 16 outputs are one run of memory,
which bulk copies bring. A header reads each: q8_0.cuh, e4m3.cuh, e4m3_wide.cuh, int4.cuh, mxfp4.cuh, super_blocks.cuh.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .codec import SuperBlock
from .ggml_types import Decoded, weights
from .packed_gemm import Layout, Packed, Plain
from .packed_layouts import ZERO, Table, Tables

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4_INPUTS = 64  # of a tile of codes of 4 and 6 bits
MAX_ZERO = 127  # that a bf16 holds above 128
WIDE = 128  # inputs of a scale, and of a tile, of e4m3_wide
ALIKE = 4, 2, 1  # tiles of e4m3_wide with the same scales: more would be more than tensor cores add up precisely


def pack(layout: Layout, codes: Tensor, **tables: Tensor) -> Packed:
    """Numbers [O, N] by the names of the layout's tables, on any device; codes of 8 bits of any dtype."""
    return Packed(layout.tables.pack({"codes": codes.view(torch.uint8), **tables}), len(codes), layout)


def scaled(numbers: Tensor, scales: Tensor) -> Tensor:
    """Numbers f32 [O, I], each by the scale of its group, of scales [O, G]."""
    return (numbers.view(*scales.shape, -1) * scales.float().unsqueeze(2)).view(numbers.shape)


def _plain_q8_0(tables: Mapping[str, Tensor]) -> Tensor:
    return scaled(tables["codes"].view(torch.int8).float(), tables["scales"])


def _plain_e4m3(tables: Mapping[str, Tensor]) -> Tensor:
    return scaled(tables["codes"].view(torch.float8_e4m3fn).float(), tables["scales"])


@functools.cache
def e2m1(device: torch.device) -> Tensor:
    """The numbers of codes of MXFP4. Kept: a captured step must not copy them from the host."""
    return torch.tensor(E2M1, device=device)


def _plain_mxfp4(tables: Mapping[str, Tensor]) -> Tensor:
    scales = torch.ldexp(torch.ones_like(tables["scales"], dtype=torch.float32), tables["scales"].int() - 127)
    return scaled(e2m1(scales.device)[tables["codes"].int()], scales)


def _plain_int4(tables: Mapping[str, Tensor]) -> Tensor:
    codes, scales = tables["codes"], tables["scales"]
    zeros = tables.get("zeros", torch.full_like(scales, ZERO, dtype=torch.uint8))
    groups = codes.view(*scales.shape, -1).short() - zeros.short().unsqueeze(2)
    return scaled(groups.view(codes.shape).float(), scales)


def _plain_super_blocks(form: SuperBlock, tables: Mapping[str, Tensor]) -> Tensor:
    """form: whose super-blocks have at most the inputs of a tile."""
    factors, numbers = (tables[name].unflatten(1, (-1, 1 + form.minima)) for name in ("factors", "numbers"))
    numbers = numbers.view(torch.int8)
    if not form.minima:
        factors, numbers = (torch.cat((x, torch.zeros_like(x)), 2) for x in (factors, numbers))
    return weights(Decoded(tables["codes"], factors, numbers[..., 0], numbers[..., 1]), form)


_BYTES = "s2 e2 t4 b2", "g t s h b e"
_FOURS = Table("codes", 4, "s4 e2 t4 b2", "g t s b e h")


def _layout(header: str, inputs: int, widening: float, tables: Tables, plain: Plain, **more: Any) -> Layout:
    return Layout(header, inputs, tables.bytes, widening, tables, plain, **more)


# Widening of q8_0 and int4 was fitted; e4m3's and mxfp4's was estimated by the number of instructions and not timed.
Q8_0 = _layout(
    "q8_0", 32, 0.62, Tables((Table("codes", 8, *_BYTES, flipped=128), Table("scales", 16, "", "g h"))), _plain_q8_0
)
E4M3 = _layout("e4m3", 32, 0.6, Tables((Table("codes", 8, *_BYTES), Table("scales", 32, "", "g h"))), _plain_e4m3)
# One row of an 8B Llama's linears is 8 to 22 % faster by a GEMM for small M than by a GEMV (H200, 2026-11-25).
_WIDE = Tables((), (Table("codes", 8, "r8 e2 t4 b2", "h r g t b e"), Table("scales", 32, "", "h g")))
_WIDE_LAYOUTS = {
    alike: _layout("e4m3_wide", WIDE, 0.6, _WIDE, _plain_e4m3, chunk=256, streamed=64, alike=alike) for alike in ALIKE
}
E4M3_WIDE = _WIDE_LAYOUTS[1]
MXFP4 = _layout("mxfp4", INT4_INPUTS, 0.66, Tables((_FOURS, Table("scales", 8, "c2", "g c h"))), _plain_mxfp4)


@functools.cache
def int4(of_scale: int, zeros: bool) -> Layout:
    """of_scale: inputs with one scale, 32 or 64. zeros: whether zero points are stored."""
    columns = f"c{INT4_INPUTS // of_scale}", "c g h"
    tables = _FOURS, Table("scales", 16, *columns), Table("zeros", 8, *columns)
    sizes = ("SCALED", of_scale), ("ZEROS", int(zeros))
    return _layout("int4", INT4_INPUTS, 0.48, Tables(tables[: 2 + zeros]), _plain_int4, sizes=sizes)


def takes_super_blocks(inputs: int, form: SuperBlock) -> bool:
    return inputs > 0 and inputs % INT4_INPUTS == inputs % form.super == 0


@functools.cache
def super_blocks(form: SuperBlock) -> Layout:
    """Codes, the factors of scales and of minima, and the numbers of both, each more by 128."""
    each, groups, kinds = INT4_INPUTS // min(form.super, INT4_INPUTS), INT4_INPUTS // form.group, 1 + form.minima
    codes = {
        4: (_FOURS,),
        6: (_FOURS, Table("codes", 2, "x2 s2 e2 t4 b2", "g t x b e h s", shift=4)),
        8: (Table("codes", 8, "x2 s2 e2 t4 b2", "x g t s h b e"),),
    }[form.bits]
    factors = Table("factors", 16, f"c{each} k{kinds}", "k c g h")
    numbers = Table("numbers", 8, f"p{groups * kinds // 2} u2", "p g u h", flipped=128)
    of_scales = ("SUPER", INT4_INPUTS // each), ("FACTORED", form.super), ("GROUP", form.group), ("MINIMA", form.minima)
    sizes = ("BITS", form.bits), ("ZERO", form.zero), *((name, int(size)) for name, size in of_scales)
    widening = 0.75 if form.bits == 6 else 0.66  # by the number of instructions
    tables, of_tile = Tables((*codes, factors, numbers)), form._replace(super=INT4_INPUTS // each)
    plain = functools.partial(_plain_super_blocks, of_tile)
    return _layout("super_blocks", INT4_INPUTS, widening, tables, plain, sizes=sizes)


def takes_wide(inputs: int, unit: int) -> bool:
    """Whether e4m3 of so many inputs, of which `unit` share a scale, can have tiles of 128 inputs."""
    return inputs % WIDE == 0 and unit % WIDE == 0 and inputs > 0


@functools.cache
def wide(unit: int, weight_only: bool = False) -> Layout:
    """E4M3_WIDE where so many inputs share a scale, a multiple of 128. Each tile has its scales, also where its
    neighbours' are the same. So kernels for small M read all of them alike, and tensor cores of 8 bits know how many
    tiles they may add up (e4m3_wgmma.cu)."""
    layout = _WIDE_LAYOUTS[next(count for count in ALIKE if unit % (count * WIDE) == 0)]
    return dataclasses.replace(layout, weight_only=weight_only)


def pack_wide(codes: Tensor, scales: Tensor, weight_only: bool = False) -> Packed:
    """Codes of e4m3 [O, I] uint8 and scales [O, G] f32, by which they are multiplied; I / G is a multiple of 128."""
    unit = codes.shape[1] // scales.shape[-1]
    return pack(wide(unit, weight_only), codes, scales=scales.float().repeat_interleave(unit // WIDE, 1))


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor, stored_zeros: bool = False) -> Packed:
    """Codes [O, I] uint8 below 16, scales [O, G] f16 and zeros [O, G] up to MAX_ZERO: (code - zero) * scale.

    Groups have a multiple of 32 inputs, tiles 64. stored_zeros: also where all are ZERO.
    """
    group = codes.shape[1] // scales.shape[1]
    of_scale = INT4_INPUTS if group % INT4_INPUTS == 0 else 32
    layout = int4(of_scale, stored_zeros or bool((zeros != ZERO).any()))
    tables = {"scales": scales.to(torch.float16), "zeros": zeros.to(torch.uint8)}
    tables = {name: x.repeat_interleave(group // of_scale, 1) for name, x in tables.items()}
    return pack(layout, codes, **tables)


def pack_super_blocks(decoded: Decoded, form: SuperBlock) -> Packed:
    codes, factors, scales, minima = decoded
    kinds = 1 + form.minima
    wide = factors.repeat_interleave(max(1, form.super // INT4_INPUTS), 1)[..., :kinds].flatten(1)
    numbers = torch.stack((scales, minima)[:kinds], 2).view(torch.uint8).flatten(1)
    return pack(super_blocks(form), codes, factors=wide, numbers=numbers)
