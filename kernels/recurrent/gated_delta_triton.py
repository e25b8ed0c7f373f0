"""Decode steps of the gated delta net on GPUs, in Triton (gated_delta.py documents the computation): equally many
tokens of each sequence; and what is around it, of any number of tokens.

All kernels may be captured in CUDA graphs: what a sequence is, and whether it begins here, is read from the device.
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


def conv_step(
    x: Tensor, weight: Tensor, state: Tensor, rows: Tensor, lengths: Tensor, bias: Tensor | None = None,
    silu: bool = True,
) -> Tensor:  # fmt: skip
    """causal_conv of sequences that decode. Rows of -1 write nothing and return zeros."""
    tokens, channels = x.shape
    taps = weight.shape[1]
    assert x.stride(1) == 1 and weight.stride(1) == 1 and state.is_contiguous()
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if tokens:
        conv_kernel[len(rows), triton.cdiv(channels, CHANNELS)](
            x, weight, weight if bias is None else bias, state, rows, lengths, out, x.stride(0), weight.stride(0),
            channels, taps - 1, state.shape[1], tokens // len(rows), CHANNELS, bias is not None, silu, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def conv_kernel(
    x, weight, bias, state, rows, lengths, out, x_row, weight_row,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, KEPT: tl.constexpr, QUERY: tl.constexpr, EACH: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """EACH channels of the QUERY tokens of one sequence. KEPT: entries of the state's ring."""
    sequence = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * EACH + tl.arange(0, EACH)
    mask = channels < CHANNELS
    row = tl.load(rows + sequence)
    there = mask & (row >= 0)
    first = tl.load(lengths + sequence) - QUERY  # the position of the first token
    taps = weight + channels.to(tl.int64) * weight_row
    kept = state + row * (KEPT * CHANNELS) + channels
    mine = x + sequence * QUERY * x_row + channels
    for j in tl.static_range(QUERY):
        newest = tl.load(mine + j * x_row, mask=there, other=0.0).to(tl.float32)
        total = newest * tl.load(taps + COLUMNS, mask=mask, other=0.0).to(tl.float32)
        for k in tl.static_range(COLUMNS):
            if j - COLUMNS + k >= 0:
                column = tl.load(mine + (j - COLUMNS + k) * x_row, mask=there, other=0.0).to(tl.float32)
            else:
                position = first + (j - COLUMNS + k)
                column = tl.load(kept + position % KEPT * CHANNELS, mask=there & (position >= 0), other=0.0)
            total += column * tl.load(taps + k, mask=mask, other=0.0).to(tl.float32)
        if KEPT > 0:  # the oldest input, which this one replaces, is read by no later token of the step
            tl.store(kept + (first + j) % KEPT * CHANNELS, newest, mask=there)
        if BIASED:
            total += tl.load(bias + channels, mask=there, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + (sequence * QUERY + j) * CHANNELS + channels, total.to(out.dtype.element_ty), mask=mask)


def delta_step(
    qkv: Tensor, gates: Gates, state: Tensor, rows: Tensor, lengths: Tensor, sizes: DeltaSizes, eps: float, out: Tensor,
    query_len: int = 1,
) -> None:  # fmt: skip
    """gated_delta of query_len tokens of each of the first sequences, as many as out [count * query_len, value heads,
    value dim] has. Rows of -1 write nothing and return zeros. eps: of the norm of queries and keys."""
    count = len(out) // query_len
    b, a = gates.b, gates.a
    assert qkv.stride(1) == b.stride(1) == a.stride(1) == 1 and state.is_contiguous() and out.is_contiguous()
    if count:
        grid = triton.cdiv(sizes.value_dim, VALUES), sizes.value_heads, count
        delta_kernel[grid](
            qkv, b, a, gates.A_log, gates.dt_bias, state, rows, lengths, out, qkv.stride(0), b.stride(0), a.stride(0),
            eps, sizes.key_dim**-0.5, sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim,
            triton.next_power_of_2(sizes.key_dim), VALUES, state.shape[1], query_len, gates.each > 1,
            float(gates.floor), num_warps=4,
        )  # fmt: skip


@triton.jit
def log_decay(a, a_log, dt_bias, FLOOR: tl.constexpr):
    """g of Gates.decays."""
    x = a.to(tl.float32) + dt_bias
    if FLOOR < 0.0:
        g = FLOOR * sigmoid(tl.exp(a_log) * x)
    else:
        soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))  # as torch's softplus
        g = -tl.exp(a_log) * soft
    return g


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def delta_kernel(
    qkv, b, a, a_log, dt_bias, state, rows, lengths, out, qkv_row, b_row, a_row, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PADDED: tl.constexpr, VALUES: tl.constexpr, ENTRIES: tl.constexpr, QUERY: tl.constexpr, CHANNELS: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    """VALUES columns of one value head's states, for the QUERY tokens of one sequence. ENTRIES: of the states' ring.
    CHANNELS: each element of a key has its decay. Neighbours in the grid are neighbours in memory."""
    sequence, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    dims = tl.arange(0, KEY_PADDED)
    real, there = dims < KEY, columns < VALUE
    to = out + (sequence * QUERY * VALUE_HEADS + head) * VALUE + columns
    row = tl.load(rows + sequence)
    if row < 0:
        for j in tl.static_range(QUERY):
            zeros = tl.zeros([VALUES], tl.float32).to(out.dtype.element_ty)
            tl.store(to + j * VALUE_HEADS * VALUE, zeros, mask=there)
    else:
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        base = state + (row * ENTRIES * VALUE_HEADS + head) * (KEY * VALUE)
        at = base + dims[:, None] * VALUE + columns[None, :]
        mask = real[:, None] & there[None, :]
        entry: tl.constexpr = VALUE_HEADS * KEY * VALUE
        first = (tl.load(lengths + sequence) - QUERY).to(tl.int64)  # 0: it begins here, whatever its row holds
        s = tl.load(at + (first + ENTRIES - 1) % ENTRIES * entry, mask=mask & (first > 0), other=0.0)
        for j in tl.static_range(QUERY):
            token = sequence * QUERY + j
            mine = qkv + token * qkv_row
            q = tl.load(mine + key_head * KEY + dims, mask=real, other=0.0).to(tl.float32)
            k = tl.load(mine + (KEY_HEADS + key_head) * KEY + dims, mask=real, other=0.0).to(tl.float32)
            v = tl.load(mine + 2 * KEY_HEADS * KEY + head * VALUE + columns, mask=there, other=0.0).to(tl.float32)
            q = q * (tl.rsqrt(tl.sum(q * q) + eps) * scale)
            k = k * tl.rsqrt(tl.sum(k * k) + eps)
            if CHANNELS:
                step = tl.load(a + token * a_row + head * KEY + dims, mask=real, other=0.0)
                bias = tl.load(dt_bias + head * KEY + dims, mask=real, other=0.0)
                s = s * tl.exp(log_decay(step, tl.load(a_log + head), bias, FLOOR))[:, None]
            else:
                step, bias = tl.load(a + token * a_row + head), tl.load(dt_bias + head)
                g = log_decay(step, tl.load(a_log + head), bias, FLOOR)
                s = s * tl.exp(g)
            beta = sigmoid(tl.load(b + token * b_row + head))
            change = (v - tl.sum(s * k[:, None], 0)) * beta
            s += k[:, None] * change[None, :]
            tl.store(at + (first + j) % ENTRIES * entry, s, mask=mask)
            y = tl.sum(s * q[:, None], 0).to(out.dtype.element_ty)
            tl.store(to + j * VALUE_HEADS * VALUE, y, mask=there)


def ungroup(qkvz: Tensor, ba: Tensor, sizes: DeltaSizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gated_delta.ungroup."""
    count, heads = len(qkvz), sizes.value_heads
    qkv, z = qkvz.new_empty(count, sizes.channels), qkvz.new_empty(count, sizes.values)
    b, a = (ba.new_empty(count, heads) for _ in range(2))
    assert qkvz.stride(1) == ba.stride(1) == 1
    if count:
        each = heads // sizes.key_heads
        wide = each * sizes.value_dim
        padded = triton.next_power_of_2(2 * (sizes.key_dim + wide)), triton.next_power_of_2(2 * each)
        ungroup_kernel[count, sizes.key_heads](
            qkvz, ba, qkv, z, b, a, qkvz.stride(0), ba.stride(0), sizes.key_heads, sizes.key_dim, wide, each, *padded,
            num_warps=4,
        )  # fmt: skip
    return qkv, z, b, a


@triton.jit
def ungroup_kernel(
    qkvz, ba, qkv, z, b, a, qkvz_row, ba_row,
    HEADS: tl.constexpr, KEY: tl.constexpr, WIDE: tl.constexpr, EACH: tl.constexpr, PADDED: tl.constexpr,
    PADDED_GATES: tl.constexpr,
):  # fmt: skip
    """A key head of a token. WIDE: elements of its values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, gate = tl.arange(0, PADDED), tl.arange(0, PADDED_GATES)
    x = tl.load(qkvz + token * qkvz_row + head * (2 * KEY + 2 * WIDE) + at, mask=at < 2 * KEY + 2 * WIDE)
    q, k, v = at, at - KEY, at - 2 * KEY
    to = qkv + token * (HEADS * (2 * KEY + WIDE))
    tl.store(to + head * KEY + q, x, mask=q < KEY)
    tl.store(to + (HEADS + head) * KEY + k, x, mask=(k >= 0) & (k < KEY))
    tl.store(to + 2 * HEADS * KEY + head * WIDE + v, x, mask=(v >= 0) & (v < WIDE))
    of_z = v - WIDE
    tl.store(z + (token * HEADS + head) * WIDE + of_z, x, mask=(of_z >= 0) & (of_z < WIDE))
    y = tl.load(ba + token * ba_row + head * (2 * EACH) + gate, mask=gate < 2 * EACH)
    mine = (token * HEADS + head) * EACH
    tl.store(b + mine + gate, y, mask=gate < EACH)
    tl.store(a + mine + gate - EACH, y, mask=(gate >= EACH) & (gate < 2 * EACH))


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, silu: bool = True) -> Tensor:
    """gated_delta.gated_norm of x that is contiguous."""
    (count, heads, dim), y = x.shape, torch.empty_like(x)
    if count:
        each = min(8, triton.next_power_of_2(heads))
        gated_norm_kernel[count, triton.cdiv(heads, each)](
            x, z, weight, y, z.stride(0), z.stride(1), eps, heads, dim, triton.next_power_of_2(dim), each, silu,
            num_warps=4,
        )  # fmt: skip
    return y


@triton.jit
def gated_norm_kernel(
    x, z, weight, y, z_token, z_head, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """EACH heads of a token; rounded where torch rounds."""
    token = tl.program_id(0).to(tl.int64)
    head, dims = tl.program_id(1) * EACH + tl.arange(0, EACH)[:, None], tl.arange(0, PADDED)[None, :]
    real = (head < HEADS) & (dims < DIM)
    at = (token * HEADS + head) * DIM + dims
    values = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / DIM + eps)
    normed = (values * scale[:, None]).to(y.dtype.element_ty).to(tl.float32)
    by = tl.load(weight + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    normed = (normed * by).to(y.dtype.element_ty).to(tl.float32)
    gate = tl.load(z + token * z_token + head * z_head + dims, mask=real, other=0.0).to(tl.float32)
    normed *= sigmoid(gate)
    tl.store(y + at, (normed * gate if SILU else normed).to(y.dtype.element_ty), mask=real)
