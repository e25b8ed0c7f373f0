"""Mamba-2's recurrence on GPUs, in Triton (ssd.py documents the computation): of sequences that decode, of prompts, and
the gated norm behind both.

A program takes some columns of a head's state through its sequence, of prompts chunk by chunk: there are as many
programs as a GPU has multiprocessors where a layer has 64 heads. All kernels but that of prompts may be captured in
CUDA graphs: what a sequence is, and whether it begins here, is read from the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated_delta_chunks_triton import STATE_16_BITS, STATE_F32
from .gated_delta_triton import VALUES, sigmoid

if TYPE_CHECKING:
    from .gated_delta import Rows
    from .ssd import SsdSizes, TimeSteps

TOKENS_F32, TOKENS_16_BITS = 32, 64  # of a chunk: shared memory holds its keys and queries


def ssd_step(
    xbc: Tensor, times: TimeSteps, state: Tensor, rows: Tensor, lengths: Tensor, sizes: SsdSizes, out: Tensor,
    query_len: int = 1,
) -> None:  # fmt: skip
    """ssd of query_len tokens of each of the first sequences, as many as out [count * query_len, heads, head dim] has.
    Rows of -1 write nothing and return zeros."""
    count, dt = len(out) // query_len, times.dt
    assert xbc.stride(1) == dt.stride(1) == 1 and state.is_contiguous() and out.is_contiguous()
    if count:
        ssd_step_kernel[triton.cdiv(sizes.head_dim, VALUES), sizes.heads, count](
            xbc, *times, state, rows, lengths, out, xbc.stride(0), dt.stride(0), *sizes,
            triton.next_power_of_2(sizes.state), VALUES, state.shape[1], query_len, num_warps=4,
        )  # fmt: skip


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))  # as torch's


@triton.jit
def ssd_step_kernel(
    xbc, dt, a_log, dt_bias, d, state, rows, lengths, out, xbc_row, dt_row,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    VALUES: tl.constexpr, ENTRIES: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """VALUES columns of one head's states, for the QUERY tokens of one sequence. ENTRIES: of the states' ring.
    Neighbours in the grid are neighbours in memory."""
    sequence, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    keys = tl.arange(0, PADDED)
    real, there = keys < STATE, columns < DIM
    to = out + (sequence * QUERY * HEADS + head) * DIM + columns
    row = tl.load(rows + sequence)
    if row < 0:
        for j in tl.static_range(QUERY):
            tl.store(to + j * HEADS * DIM, tl.zeros([VALUES], tl.float32).to(out.dtype.element_ty), mask=there)
    else:
        at = state + (row * ENTRIES * HEADS + head) * (STATE * DIM) + keys[:, None] * DIM + columns[None, :]
        mask = real[:, None] & there[None, :]
        entry: tl.constexpr = HEADS * STATE * DIM
        first = (tl.load(lengths + sequence) - QUERY).to(tl.int64)  # 0: it begins here, whatever its row holds
        s = tl.load(at + (first + ENTRIES - 1) % ENTRIES * entry, mask=mask & (first > 0), other=0.0)
        rate, passed = -tl.exp(tl.load(a_log + head)), tl.load(d + head)
        for j in tl.static_range(QUERY):
            token = sequence * QUERY + j
            mine = xbc + token * xbc_row
            of_group = mine + HEADS * DIM + head // (HEADS // GROUPS) * STATE + keys
            b = tl.load(of_group, mask=real, other=0.0).to(tl.float32)
            c = tl.load(of_group + GROUPS * STATE, mask=real, other=0.0).to(tl.float32)
            x = tl.load(mine + head * DIM + columns, mask=there, other=0.0).to(tl.float32)
            step = softplus(tl.load(dt + token * dt_row + head).to(tl.float32) + tl.load(dt_bias + head))
            s = s * tl.exp(rate * step) + b[:, None] * (x * step)[None, :]
            tl.store(at + (first + j) % ENTRIES * entry, s, mask=mask)
            y = tl.sum(s * c[:, None], 0) + passed * x
            tl.store(to + j * HEADS * DIM, y.to(out.dtype.element_ty), mask=there)


def ssd_chunks(xbc: Tensor, times: TimeSteps, state: Tensor, batch: Rows, sizes: SsdSizes, out: Tensor) -> None:
    """ssd of the sequences behind the first num_decodes, into out [T, heads, head dim]. All tensors are those of the
    whole step."""
    dt, decodes = times.dt, batch.num_decodes
    assert xbc.stride(1) == dt.stride(1) == 1 and state.is_contiguous() and out.is_contiguous()
    exact = xbc.dtype == torch.float32
    columns, warps = STATE_F32 if exact else STATE_16_BITS
    columns = min(columns, triton.next_power_of_2(max(sizes.head_dim, 16)))
    ssd_chunk_kernel[len(batch.query_lens) - decodes, sizes.heads, triton.cdiv(sizes.head_dim, columns)](
        xbc, *times, batch.rows, batch.lengths, batch.query_starts, state, out, decodes, xbc.stride(0), dt.stride(0),
        *sizes, triton.next_power_of_2(max(sizes.state, 16)), columns, state.shape[1],
        TOKENS_F32 if exact else TOKENS_16_BITS, "tf32x3" if exact else "tf32", num_warps=warps, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=("decodes",))
def ssd_chunk_kernel(
    xbc, dt, a_log, dt_bias, d, rows, lengths, starts, state, out, decodes, xbc_row, dt_row,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, STATE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    VALUES: tl.constexpr, ENTRIES: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """VALUES columns of one head's state through all chunks of one sequence. ENTRIES: of the states' ring."""
    dtype = xbc.dtype.element_ty
    sequence, head = decodes + tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    places, keys = tl.arange(0, TOKENS), tl.arange(0, PADDED)
    there, of_state = columns < DIM, keys < STATE
    lower = places[:, None] >= places[None, :]
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    length = tl.load(lengths + sequence).to(tl.int64)
    before = length - (end - start)  # 0: it begins here, whatever its row holds
    base = state + (tl.load(rows + sequence) * ENTRIES * HEADS + head) * (STATE * DIM)
    at = base + keys[:, None] * DIM + columns[None, :]
    mask = of_state[:, None] & there[None, :]
    entry: tl.constexpr = HEADS * STATE * DIM
    s = tl.load(at + (before + ENTRIES - 1) % ENTRIES * entry, mask=mask & (before > 0), other=0.0)
    rate, bias, passed = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(d + head)
    for first in range(start, end, TOKENS):
        t = first + places
        real = t < end
        step = softplus(tl.load(dt + t * dt_row + head, mask=real, other=0.0).to(tl.float32) + bias)
        step = tl.where(real, step, 0.0)
        total = tl.cumsum(rate * step, 0)  # logarithms of what is left of a state after each token
        all_of = tl.sum(rate * step, 0)
        of_group = xbc + t[:, None] * xbc_row + HEADS * DIM + head // (HEADS // GROUPS) * STATE + keys[None, :]
        b = tl.load(of_group, mask=real[:, None] & of_state[None, :], other=0.0)
        c = tl.load(of_group + GROUPS * STATE, mask=real[:, None] & of_state[None, :], other=0.0)
        whole = real[:, None] & there[None, :]
        x = tl.load(xbc + t[:, None] * xbc_row + head * DIM + columns[None, :], mask=whole, other=0.0).to(tl.float32)
        v = x * step[:, None]
        spans = tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0))
        within = tl.where(lower, tl.dot(c, tl.trans(b), input_precision=PRECISION) * spans, 0.0)
        y = tl.dot(c, s.to(dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
        y += tl.dot(within.to(dtype), v.to(dtype), input_precision=PRECISION) + passed * x
        to = out + (t[:, None] * HEADS + head) * DIM + columns[None, :]
        tl.store(to, y.to(dtype), mask=whole)
        v = (v * tl.exp(all_of - total)[:, None]).to(dtype)
        s = s * tl.exp(all_of) + tl.dot(tl.trans(b), v, input_precision=PRECISION)
    tl.store(at + (length - 1) % ENTRIES * entry, s, mask=mask)


def ssd_norm(x: Tensor, z: Tensor, weight: Tensor | None, eps: float, groups: int, gate_first: bool) -> Tensor:
    """ssd.ssd_norm."""
    (count, values), y = x.shape, torch.empty_like(x)
    if count:
        size = values // groups
        ssd_norm_kernel[count, groups](
            x, z, z if weight is None else weight, y, z.stride(0), eps, values, size, triton.next_power_of_2(size),
            weight is not None, gate_first, num_warps=4 if size <= 2048 else 8,
        )  # fmt: skip
    return y


@triton.jit
def ssd_norm_kernel(
    x, z, weight, y, z_row, eps,
    VALUES: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, NORMED: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """A group of a token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    real = at < SIZE
    at += tl.program_id(1) * SIZE
    value = tl.load(x + token * VALUES + at, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_row + at, mask=real, other=0.0).to(tl.float32)
    gate = gate * sigmoid(gate)
    if NORMED:
        inside = value * gate if GATE_FIRST else value
        scale = tl.rsqrt(tl.sum(inside * inside, 0) / SIZE + eps)
        value = value * scale * tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    tl.store(y + token * VALUES + at, (value * gate).to(y.dtype.element_ty), mask=real)
