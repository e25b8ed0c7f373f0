"""GEMMs with weights of floats.py in Triton, which dequantises a tile where it is multiplied; imported on GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import dot_precision
from .floats import Floats

MOST_ROWS = 64  # of more, dequantising all of the weight first is worth it
INPUTS = 128  # of a tile of `linear`
SPAN = 1024  # elements that a program of `dequantize` makes


@triton.jit
def weight_tile(
    w, scales, rows, at, inputs,
    TO: tl.constexpr, SIZE: tl.constexpr, INPUTS: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Inputs at:at + INPUTS of rows [OUTPUTS] of a weight [.., SIZE]: [INPUTS, OUTPUTS] of dtype TO.

    KIND: 0 is plain, 1 e4m3 and 2 e2m1 of floats.py, of which UNIT inputs share a scale. By way of f16, which has their
    smallest numbers, too.
    """
    columns = at + inputs
    there = (columns < SIZE)[:, None]
    if KIND == 0:
        from_w = w + rows[None, :] * SIZE + columns[:, None]
        y = tl.load(from_w, mask=there, other=0.0) if SIZE % INPUTS else tl.load(from_w)
    else:
        if KIND == 1:
            code = tl.load(w + rows[None, :] * SIZE + columns[:, None], mask=there, other=0).to(tl.uint16)
            value = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        else:
            byte = tl.load(w + rows[None, :] * (SIZE // 2) + (columns // 2)[:, None], mask=there, other=0)
            code = (byte.to(tl.int32) >> (columns % 2 * 4)[:, None]).to(tl.uint16)
            value = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        if UNIT % INPUTS == 0:
            by = tl.load(scales + rows * (SIZE // UNIT) + at // UNIT)[None, :]
        else:
            by = tl.load(scales + rows[None, :] * (SIZE // UNIT) + (columns // UNIT)[:, None], mask=there, other=0)
        if KIND == 2:
            by = (by.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        y = (value * by).to(TO)
    return y


def stored(weight: Tensor | Floats) -> tuple[Tensor, Tensor, int, int]:
    """Codes, scales, and KIND and UNIT of `weight_tile`."""
    if isinstance(weight, Floats):
        return weight.codes, weight.scales, 2 if weight.pairs else 1, weight.unit
    return weight, weight, 0, 1


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, w, scales, bias, y, rows,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    KIND: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [rows, WIDTH] of x [rows, SIZE]."""
    outputs, inputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    from_x = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * SIZE + inputs[None, :]
    columns = (outputs % WIDTH).to(tl.int64)  # those past the end compute what nobody stores
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, SIZE, INPUTS):
        if SIZE % INPUTS:
            a = tl.load(from_x + at, mask=(inputs < SIZE - at)[None, :], other=0.0)
        else:
            a = tl.load(from_x + at)
        b = weight_tile(w, scales, columns, at, inputs, a.dtype, SIZE, INPUTS, KIND, UNIT)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
    to = y + row.to(tl.int64)[:, None] * WIDTH + outputs[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (outputs < WIDTH)[None, :])


@triton.jit
def dequantize_kernel(w, scales, y, SIZE: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr):
    """y [rows, SIZE], of which a program makes SPAN elements of one row."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    at = tl.program_id(1) * SPAN
    inputs = tl.arange(0, SPAN)
    made = weight_tile(w, scales, row, at, inputs, y.dtype.element_ty, SIZE, SPAN, KIND, UNIT)
    tl.store(y + row[None, :] * SIZE + (at + inputs)[:, None], made, mask=(at + inputs < SIZE)[:, None])


def supports(x: Tensor, packed: Floats, bias: Tensor | None = None) -> bool:
    """Whether `linear` takes these and is faster than `dequantize` and a GEMM."""
    few = 0 < len(x) <= MOST_ROWS and x.element_size() == 2
    return few and packed.codes.numel() > 0 and (bias is None or bias.dtype == x.dtype)


def linear(x: Tensor, packed: Floats, bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O]: [T, O], contiguous; accumulated in f32."""
    x = x.contiguous()
    (rows, size), width = x.shape, packed.outputs
    y = x.new_empty(rows, width)
    codes, scales, kind, unit = stored(packed)
    high, wide = max(16, min(triton.next_power_of_2(rows), 64)), 32 if rows <= 16 else 64
    stages = 2 if unit % INPUTS else 4 if rows <= 16 else 3  # scales of a tile of many take room, too
    linear_kernel[triton.cdiv(width, wide), triton.cdiv(rows, high)](
        x, codes, scales, x if bias is None else bias, y, rows, width, size, high, wide, INPUTS, kind, unit,
        bias is not None, dot_precision(x), num_warps=4, num_stages=stages,
    )  # fmt: skip
    return y


def dequantize(packed: Floats, dtype: torch.dtype) -> Tensor:
    """The weight [O, I], each element rounded once."""
    y = torch.empty(packed.shape, dtype=dtype, device=packed.codes.device)
    if y.numel():
        codes, scales, kind, unit = stored(packed)
        span = min(SPAN, triton.next_power_of_2(packed.inputs))
        grid = packed.outputs, triton.cdiv(packed.inputs, span)
        dequantize_kernel[grid](codes, scales, y, packed.inputs, span, kind, unit, num_warps=4)
    return y
