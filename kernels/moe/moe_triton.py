"""Grouped GEMMs of experts in Triton, over routed tokens that are sorted by expert; moe.py imports it where it is used.

A program multiplies a tile of one expert's routed tokens with some of its outputs. Programs with the same routed tokens
follow each other, so that these, and the expert's matrices for its next tile, come from the second-level cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..activation import activation
from ..device import dot_precision, overlaps
from .group import Groups

if TYPE_CHECKING:
    from .plain_experts import TileConfig

COLUMNS = 1024  # of a program that adds up a token's experts


# Activations by their numbers, which activation.py gives.
GELU = tl.constexpr(activation.ACTIVATIONS.index("gelu"))
GELU_TANH = tl.constexpr(activation.ACTIVATIONS.index("gelu_tanh"))
RELU2 = tl.constexpr(activation.ACTIVATIONS.index("relu2"))
CLAMPED_SWIGLU = tl.constexpr(activation.ACTIVATIONS.index(activation.CLAMPED_SWIGLU))
SILU_CLAMPED = tl.constexpr(activation.ACTIVATIONS.index(activation.SILU_CLAMPED))
KINDS = tl.constexpr(1 << activation.KIND_BITS)
LIMIT_UNITS = tl.constexpr(activation.LIMIT_UNITS)
SLOPE = tl.constexpr(activation.SLOPE)


@triton.jit
def _activated(gate, up, ACT: tl.constexpr):
    """act(gate) * up in f32; ACT as in activation.act_number."""
    # Taken as a difference, since Triton's interpreter has no remainder of a number by one of these constants.
    kind: tl.constexpr = ACT - ACT // KINDS * KINDS
    if kind == GELU:
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    if kind == RELU2:
        return tl.where(gate > 0, gate * gate, 0.0) * up
    if kind >= CLAMPED_SWIGLU:  # NaNs stay NaNs
        limit: tl.constexpr = (ACT // KINDS) / LIMIT_UNITS
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        if kind == SILU_CLAMPED:
            y = gate / (1 + tl.exp(-gate))
            return tl.where(y > limit, limit, y) * up
        gate = tl.where(gate > limit, limit, gate)
        if kind == CLAMPED_SWIGLU:
            return gate / (1 + tl.exp(-SLOPE * gate)) * (up + 1)
    z = gate
    if kind == GELU_TANH:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-z)) * up


@triton.jit
def _weight_tile(w, rows, at, inputs, SIZE: tl.constexpr, INPUTS: tl.constexpr):
    """Inputs at:at + INPUTS of rows [OUTPUTS] of a weight [.., SIZE]: [INPUTS, OUTPUTS]."""
    columns = at + inputs
    from_w = w + rows[None, :] * SIZE + columns[:, None]
    return tl.load(from_w, mask=(columns < SIZE)[:, None], other=0.0) if SIZE % INPUTS else tl.load(from_w)


@triton.jit
def expert_up_kernel(
    x, w13, bias, sorted_ids, offsets, tile_expert, tile_start, weights, h,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """h [routed, INNER] in the order of `sorted_ids`: weight of the routed token * act(gate) * up. Without GATED w13
    is up alone, which is activated."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (INNER + OUTPUTS - 1) // OUTPUTS
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    rows = tl.load(tile_start + tile) + tl.arange(0, ROWS)
    valid = rows < tl.load(offsets + expert + 1)
    routed = tl.load(sorted_ids + rows, mask=valid, other=0)  # results of rows past the end are not stored
    outputs, inputs = block * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    from_x = x + (routed // TOP).to(tl.int64)[:, None] * HIDDEN + inputs[None, :]
    gates = expert * (2 * INNER if GATED else INNER) + outputs % INNER
    gate = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, HIDDEN, INPUTS):
        if HIDDEN % INPUTS:
            a = tl.load(from_x + at, mask=(inputs < HIDDEN - at)[None, :], other=0.0)
        else:
            a = tl.load(from_x + at)
        b = _weight_tile(w13, gates, at, inputs, HIDDEN, INPUTS)
        gate = tl.dot(a, b, gate, input_precision=PRECISION)
        if GATED:
            c = _weight_tile(w13, gates + INNER, at, inputs, HIDDEN, INPUTS)
            up = tl.dot(a, c, up, input_precision=PRECISION)
    if BIAS:
        from_bias = bias + gates
        gate += tl.load(from_bias).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(from_bias + INNER).to(tl.float32)[None, :]
    if not GATED:
        up += 1.0
    y = _activated(gate, up, ACT) * tl.load(weights + routed)[:, None]
    to = h + rows.to(tl.int64)[:, None] * INNER + outputs[None, :]
    tl.store(to, y.to(h.dtype.element_ty), mask=valid[:, None] & (outputs < INNER)[None, :])


@triton.jit
def expert_down_kernel(
    h, w2, bias, sorted_ids, offsets, tile_expert, tile_start, weights, y,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y [routed, HIDDEN], in the routed tokens' own order, of h [routed, INNER] in that of `sorted_ids`.

    h has the routed tokens' weights in it, a bias gets them here.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (HIDDEN + OUTPUTS - 1) // OUTPUTS
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    end = tl.load(offsets + expert + 1)
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
        b = _weight_tile(w2, columns, at, inputs, INNER, INPUTS)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    routed = tl.load(sorted_ids + rows)
    if BIAS:
        added = tl.load(bias + columns).to(tl.float32)
        acc += added[None, :] * tl.load(weights + routed)[:, None]
    to = y + routed.to(tl.int64)[:, None] * HIDDEN + outputs[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=valid[:, None] & (outputs < HIDDEN)[None, :])


@triton.jit
def combine_kernel(
    routed, ids, y, first, experts, HIDDEN: tl.constexpr, TOP: tl.constexpr, PADDED: tl.constexpr,
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
        routed + (token * TOP + j)[:, None] * HIDDEN + columns[None, :],
        mask=added[:, None] & there[None, :], other=0.0,
    )  # fmt: skip
    tl.store(y + token * HIDDEN + columns, tl.sum(x.to(tl.float32), 0).to(y.dtype.element_ty), mask=there)


def expert_up(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, groups: Groups, act: int, config: TileConfig,
    bias: Tensor | None, h: Tensor, gated: bool = True,
) -> None:  # fmt: skip
    """Fill h [routed, I], in the order of the groups: the routed tokens' weights * act(gate) * up. bias [E, 2 I]: added
    before. Not gated: w13 [E, I, H] and bias [E, I] are up's alone."""
    hidden, inner, overlap = x.shape[1], h.shape[1], overlaps(x)
    grid = (len(groups.tile_expert) * triton.cdiv(inner, config.outputs),)
    expert_up_kernel[grid](
        x, w13, x if bias is None else bias, *groups, weights, h, hidden, inner, ids.shape[1], act,
        config.rows, config.outputs, config.inputs, bias is not None, dot_precision(x), overlap, gated,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip


def expert_down(
    h: Tensor, w2: Tensor, groups: Groups, config: TileConfig, weights: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """Fill y [routed, H], in the routed tokens' own order, of what `expert_up` makes. bias [E, H]: added, times the
    routed tokens' weights."""
    (hidden, inner), overlap = w2.shape[1:], overlaps(h)
    grid = (len(groups.tile_expert) * triton.cdiv(hidden, config.outputs),)
    expert_down_kernel[grid](
        h, w2, h if bias is None else bias, *groups, weights, y, hidden, inner,
        config.rows, config.outputs, config.inputs, bias is not None, dot_precision(h), overlap,
        num_warps=config.warps, num_stages=config.stages, launch_pdl=overlap,
    )  # fmt: skip


def combine(routed: Tensor, ids: Tensor, local_experts: range | None = None) -> Tensor:
    """[T, H]: the sums of n rows each of routed tokens [T * n, H]. held: the experts whose rows count, of ids [T, n];
    None: all."""
    tokens, hidden, overlap = len(ids), routed.shape[1], overlaps(routed)
    top = len(routed) // tokens
    first, experts = (local_experts.start, len(local_experts)) if local_experts else (0, 0)
    y = routed.new_empty(tokens, hidden)
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    combine_kernel[tokens, triton.cdiv(hidden, columns)](
        routed, ids, y, first, experts, hidden, top, triton.next_power_of_2(top), columns, local_experts is not None,
        overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return y
