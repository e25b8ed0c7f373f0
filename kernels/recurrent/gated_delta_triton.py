"""Decode steps of the gated delta net on GPUs, in Triton (gated_delta.py says what is computed): one token a sequence.

Both kernels may be captured in CUDA graphs: what a sequence is, and whether it begins here, is read from the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .gated_delta import DeltaSizes, Gates

CHANNELS = 256  # of a program of the convolution
VALUES = 32  # columns of a state that one program updates: so many programs fill a GPU also at small batches


def conv_step(x: Tensor, weight: Tensor, state: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """causal_conv of one token of each sequence. Rows of -1 write nothing and return zeros."""
    count, channels = x.shape
    taps = weight.shape[1]
    assert x.stride(1) == 1 and weight.stride(1) == 1 and state.is_contiguous()
    out = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    if count:
        conv_kernel[count, triton.cdiv(channels, CHANNELS)](
            x, weight, state, rows, lengths, out, x.stride(0), weight.stride(0), channels, taps - 1, CHANNELS,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def conv_kernel(
    x, weight, state, rows, lengths, out, x_row, weight_row,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """EACH channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * EACH + tl.arange(0, EACH)
    mask = channels < CHANNELS
    row = tl.load(rows + token)
    fresh = tl.load(lengths + token) <= 1
    newest = tl.load(x + token * x_row + channels, mask=mask & (row >= 0), other=0.0).to(tl.float32)
    taps = weight + channels.to(tl.int64) * weight_row
    kept = state + row * (COLUMNS * CHANNELS) + channels
    older = mask & (row >= 0)
    total = newest * tl.load(taps + COLUMNS, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(COLUMNS):
        column = tl.load(kept + k * CHANNELS, mask=older & (fresh == 0), other=0.0)
        total += column * tl.load(taps + k, mask=mask, other=0.0).to(tl.float32)
        if k > 0:
            tl.store(kept + (k - 1) * CHANNELS, column, mask=older)
    if COLUMNS > 0:
        tl.store(kept + (COLUMNS - 1) * CHANNELS, newest, mask=older)
    total = total / (1.0 + tl.exp(-total))
    tl.store(out + token * CHANNELS + channels, total.to(out.dtype.element_ty), mask=mask)


def delta_step(
    qkv: Tensor, gates: Gates, state: Tensor, rows: Tensor, lengths: Tensor, sizes: DeltaSizes, eps: float, out: Tensor
) -> None:
    """gated_delta of one token of each of the first sequences, as many as out [count, value heads, value dim] has. Rows
    of -1 write nothing and return zeros. eps: of the norm of queries and keys."""
    count = len(out)
    b, a = gates.b, gates.a
    assert qkv.stride(1) == b.stride(1) == a.stride(1) == 1 and state.is_contiguous() and out.is_contiguous()
    if count:
        grid = count, sizes.value_heads, triton.cdiv(sizes.value_dim, VALUES)
        delta_kernel[grid](
            qkv, b, a, gates.A_log, gates.dt_bias, state, rows, lengths, out, qkv.stride(0), b.stride(0), a.stride(0),
            eps, sizes.key_dim**-0.5, sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim,
            triton.next_power_of_2(sizes.key_dim), VALUES, num_warps=4,
        )  # fmt: skip


@triton.jit
def log_decay(a, a_log, dt_bias):
    """g of Gates.decays."""
    x = a.to(tl.float32) + dt_bias
    soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))  # as torch's softplus
    return -tl.exp(a_log) * soft


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def delta_kernel(
    qkv, b, a, a_log, dt_bias, state, rows, lengths, out, qkv_row, b_row, a_row, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PADDED: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """VALUES columns of one value head's state, for one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    dims = tl.arange(0, KEY_PADDED)
    real, there = dims < KEY, columns < VALUE
    to = out + (token * VALUE_HEADS + head) * VALUE + columns
    row = tl.load(rows + token)
    if row < 0:
        tl.store(to, tl.zeros([VALUES], tl.float32).to(out.dtype.element_ty), mask=there)
    else:
        mine = qkv + token * qkv_row
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        q = tl.load(mine + key_head * KEY + dims, mask=real, other=0.0).to(tl.float32)
        k = tl.load(mine + (KEY_HEADS + key_head) * KEY + dims, mask=real, other=0.0).to(tl.float32)
        v = tl.load(mine + 2 * KEY_HEADS * KEY + head * VALUE + columns, mask=there, other=0.0).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q) + eps) * scale)
        k = k * tl.rsqrt(tl.sum(k * k) + eps)
        decay = tl.exp(log_decay(tl.load(a + token * a_row + head), tl.load(a_log + head), tl.load(dt_bias + head)))
        beta = sigmoid(tl.load(b + token * b_row + head))
        base = state + (row * VALUE_HEADS + head) * (KEY * VALUE)
        at = base + dims[:, None] * VALUE + columns[None, :]
        mask = real[:, None] & there[None, :]
        begun = tl.load(lengths + token) > 1  # else the sequence begins here, whatever its row holds
        s = tl.load(at, mask=mask & begun, other=0.0) * decay
        change = (v - tl.sum(s * k[:, None], 0)) * beta
        s += k[:, None] * change[None, :]
        tl.store(at, s, mask=mask)
        tl.store(to, tl.sum(s * q[:, None], 0).to(out.dtype.element_ty), mask=there)
