"""Grouped GEMMs of experts in Triton, over pairs that are sorted by expert; moe.py imports it where it is used.

A program multiplies a tile of one expert's pairs with some of its outputs. Programs with the same pairs follow each
other, so that these, and the expert's matrices for its next tile, come from the second-level cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..device import dot_precision, overlaps
from ..quantized.floats import Floats
from ..quantized.floats_triton import stored, weight_tile
from .group import Groups

if TYPE_CHECKING:
    from .moe import TileConfig

COLUMNS = 1024  # of a program that adds up a token's experts


@triton.jit
def _activated(gate, up, ACT: tl.constexpr):
    """act(gate) * up in f32; ACT as in activation.ACTIVATIONS."""
    if ACT == 1:
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    if ACT == 3:
        return tl.where(gate > 0, gate * gate, 0.0) * up
    if ACT == 4:  # NaNs stay NaNs
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)
    z = gate
    if ACT == 2:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-z)) * up


@triton.jit
def expert_up_kernel(
    x, w13, scales, bias, order, ends, tile_expert, tile_start, weights, h,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """h [pairs, INNER] in the order of `order`: weight of the pair * act(gate) * up."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (INNER + OUTPUTS - 1) // OUTPUTS
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(tile_start + tile) + tl.arange(0, ROWS)
    valid = rows < tl.load(ends + expert + 1)
    pairs = tl.load(order + rows, mask=valid, other=0)  # rows past the end compute what nobody stores
    outputs, inputs = block * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    from_x = x + (pairs // TOP).to(tl.int64)[:, None] * HIDDEN + inputs[None, :]
    gates = expert * 2 * INNER + outputs % INNER
    gate = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, HIDDEN, INPUTS):
        if HIDDEN % INPUTS:
            a = tl.load(from_x + at, mask=(inputs < HIDDEN - at)[None, :], other=0.0)
        else:
            a = tl.load(from_x + at)
        b = weight_tile(w13, scales, gates, at, inputs, a.dtype, HIDDEN, INPUTS, KIND, UNIT)
        c = weight_tile(w13, scales, gates + INNER, at, inputs, a.dtype, HIDDEN, INPUTS, KIND, UNIT)
        gate = tl.dot(a, b, gate, input_precision=PRECISION)
        up = tl.dot(a, c, up, input_precision=PRECISION)
    if BIAS:
        from_bias = bias + gates
        gate += tl.load(from_bias).to(tl.float32)[None, :]
        up += tl.load(from_bias + INNER).to(tl.float32)[None, :]
    y = _activated(gate, up, ACT) * tl.load(weights + pairs)[:, None]
    to = h + rows.to(tl.int64)[:, None] * INNER + outputs[None, :]
    tl.store(to, y.to(h.dtype.element_ty), mask=valid[:, None] & (outputs < INNER)[None, :])


@triton.jit
def expert_down_kernel(
    h, w2, scales, bias, order, ends, tile_expert, tile_start, weights, y,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    KIND: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [pairs, HIDDEN], in the pairs' own order, of h [pairs, INNER] in that of `order`.

    h has the pairs' weights in it, a bias gets them here.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (HIDDEN + OUTPUTS - 1) // OUTPUTS
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    end = tl.load(ends + expert + 1)
    rows = tl.load(tile_start + tile) + tl.arange(0, ROWS)
    valid = rows < end
    rows = tl.minimum(rows, end - 1)
    outputs, inputs = block * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    from_h = h + rows.to(tl.int64)[:, None] * INNER + inputs[None, :]
    columns = expert * HIDDEN + outputs % HIDDEN
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, INNER, INPUTS):
        if INNER % INPUTS:
            a = tl.load(from_h + at, mask=(inputs < INNER - at)[None, :], other=0.0)
        else:
            a = tl.load(from_h + at)
        b = weight_tile(w2, scales, columns, at, inputs, a.dtype, INNER, INPUTS, KIND, UNIT)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    pairs = tl.load(order + rows)
    if BIAS:
        added = tl.load(bias + columns).to(tl.float32)
        acc += added[None, :] * tl.load(weights + pairs)[:, None]
    to = y + pairs.to(tl.int64)[:, None] * HIDDEN + outputs[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=valid[:, None] & (outputs < HIDDEN)[None, :])


@triton.jit
def combine_kernel(
    pairs, ids, y, first, experts, HIDDEN: tl.constexpr, TOP: tl.constexpr, PADDED: tl.constexpr,
    COLUMNS: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [tokens, HIDDEN]: the sums of TOP rows each, added up in f32. With PART those of `experts` from `first` on."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, PADDED)
    there = columns < HIDDEN
    added = j < TOP
    if PART:
        expert = tl.load(ids + token * TOP + j, mask=added, other=-1) - first
        added = added & (expert >= 0) & (expert < experts)
    x = tl.load(
        pairs + (token * TOP + j)[:, None] * HIDDEN + columns[None, :],
        mask=added[:, None] & there[None, :], other=0.0,
    )  # fmt: skip
    tl.store(y + token * HIDDEN + columns, tl.sum(x.to(tl.float32), 0).to(y.dtype.element_ty), mask=there)


def expert_up(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor | Floats,
    groups: Groups,
    act: int,
    config: TileConfig,
    bias: Tensor | None,
    h: Tensor,
) -> None:
    """Fill h [pairs, I], in the order of the groups: the pairs' weights * act(gate) * up. bias [E, 2 I]: added
    before."""
    hidden, inner, overlap = x.shape[1], w13.shape[1] // 2, overlaps(x)
    codes, scales, kind, unit = stored(w13)
    grid = (len(groups.tile_expert) * triton.cdiv(inner, config.outputs),)
    expert_up_kernel[grid](
        x, codes, scales, x if bias is None else bias, *groups, weights, h, hidden, inner, ids.shape[1], act,
        config.rows, config.outputs, config.inputs, kind, unit, bias is not None, dot_precision(x), overlap,
        num_warps=config.warps, num_stages=stages(config, kind, unit), launch_pdl=overlap,
    )  # fmt: skip


def expert_down(
    h: Tensor,
    w2: Tensor | Floats,
    groups: Groups,
    config: TileConfig,
    weights: Tensor,
    bias: Tensor | None,
    y: Tensor,
) -> None:
    """Fill y [pairs, H], in the pairs' own order, of what `expert_up` makes. bias [E, H]: added, times the pairs'
    weights."""
    (hidden, inner), overlap = w2.shape[1:], overlaps(h)
    codes, scales, kind, unit = stored(w2)
    grid = (len(groups.tile_expert) * triton.cdiv(hidden, config.outputs),)
    expert_down_kernel[grid](
        h, codes, scales, h if bias is None else bias, *groups, weights, y, hidden, inner,
        config.rows, config.outputs, config.inputs, kind, unit, bias is not None, dot_precision(h), overlap,
        num_warps=config.warps, num_stages=stages(config, kind, unit), launch_pdl=overlap,
    )  # fmt: skip


def stages(config: TileConfig, kind: int, unit: int) -> int:
    """Of a GEMM's loop. Where a step's inputs share no scale, each element of e4m3 has one in f32, which takes more
    shared memory than the weights do: of large tiles two stages fit."""
    return min(config.stages, 2) if kind == 1 and unit % config.inputs else config.stages


def combine(pairs: Tensor, ids: Tensor, held: range | None = None) -> Tensor:
    """[T, H]: the sums of n rows each of pairs [T * n, H]. held: the experts whose rows count, of ids [T, n]; None:
    all."""
    tokens, hidden, overlap = len(ids), pairs.shape[1], overlaps(pairs)
    top = len(pairs) // tokens
    first, experts = (held.start, len(held)) if held else (0, 0)
    y = pairs.new_empty(tokens, hidden)
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    combine_kernel[tokens, triton.cdiv(hidden, columns)](
        pairs, ids, y, first, experts, hidden, top, triton.next_power_of_2(top), columns, held is not None, overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return y
