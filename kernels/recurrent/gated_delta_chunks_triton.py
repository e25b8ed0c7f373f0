"""Prompts of the gated delta net on GPUs, in Triton (gated_delta.py documents the computation): chunks of CHUNK tokens.

Chunks first compute what needs no state, all at once: the inverse of their triangular system, and with it what each
token writes (`u`) and reads of the state before the chunk (`w`). Then a program for some columns of each state goes
through its sequence's chunks. Norms of queries and keys and decays are factors of rows, so that they are multiplied in
f32, and tensor cores get queries and keys as they lie. GEMMs take inputs of the step's dtype and
sum in f32.

What is kept between the two kernels has an entry for each token, so chunks that are not full cost no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated_delta import CHUNK
from .gated_delta_triton import log_decay, sigmoid

if TYPE_CHECKING:
    from .gated_delta import DeltaSizes, Gates, Rows

CHANNELS = 64  # of a program of the convolution
# Columns of a state that one program takes through a sequence, and the program's warps, in f32 and in 16 bits. Four
# warps would get wgmma on Hopper for 16-bit GEMMs of so many rows. There ptxas 12.8, which Triton 3.6 has, takes
# registers of other meaning for descriptors: "an illegal memory access was encountered". Two warps get mma.sync.
STATE_F32, STATE_16_BITS = (32, 8), (16, 2)
SYSTEM_WARPS = 8  # with four, there are too few registers, and the same happens
VARYING = "decodes", "factors_row"  # from step to step: kernels are not compiled anew for multiples of 16
BLOCK = 16  # rows of a diagonal block of the system, which is inverted row by row; a chunk has four


def chunk_table(batch: Rows) -> Tensor:
    """Sequence and first token of each chunk, [M, 2] int32, in the order of tokens. Made once a step, on the device:
    nothing waits for it."""
    table: Tensor | None = batch.scratch.get("chunk_table")
    if table is None:
        starts = batch.query_starts.long()
        chunks = (starts.diff() + CHUNK - 1) // CHUNK
        count = sum(triton.cdiv(n, CHUNK) for n in batch.query_lens)
        sequences = torch.arange(len(chunks), device=starts.device).repeat_interleave(chunks, output_size=count)
        before = (chunks.cumsum(0) - chunks)[sequences]
        first = starts[sequences] + (torch.arange(count, device=starts.device) - before) * CHUNK
        table = batch.scratch["chunk_table"] = torch.stack((sequences, first), 1).int()
    return table


def conv_chunks(
    x: Tensor, weight: Tensor, state: Tensor, batch: Rows, bias: Tensor | None = None, silu: bool = True
) -> Tensor:
    """causal_conv of sequences of any number of tokens."""
    channels, taps = weight.shape
    assert x.stride(1) == 1 and weight.stride(1) == 1 and state.is_contiguous()
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    table = chunk_table(batch)
    conv_chunk_kernel[len(table), triton.cdiv(channels, CHANNELS)](
        x, weight, weight if bias is None else bias, state, batch.rows, batch.lengths, batch.query_starts, table, out,
        x.stride(0), weight.stride(0), channels, taps - 1, state.shape[1],
        triton.next_power_of_2(max(state.shape[1], 1)), CHUNK, CHANNELS, bias is not None, silu, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def conv_chunk_kernel(
    x, weight, bias, state, rows, lengths, starts, table, out, x_row, weight_row,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, KEPT: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
    EACH: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """EACH channels of one chunk. A sequence's first chunk also writes its new state: it alone reads the old one. KEPT:
    entries of the state's ring; PADDED: a power of two."""
    chunk = table + 2 * tl.program_id(0)
    sequence, first = tl.load(chunk), tl.load(chunk + 1).to(tl.int64)
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    before = tl.load(lengths + sequence) - (end - start)  # tokens; a position is a token's index less start, and this
    channels = tl.program_id(1) * EACH + tl.arange(0, EACH)
    there = channels < CHANNELS
    kept = state + tl.load(rows + sequence) * (KEPT * CHANNELS) + channels[None, :]
    t = first + tl.arange(0, TOKENS)
    real = (t < end)[:, None] & there[None, :]
    total = tl.zeros([TOKENS, EACH], tl.float32)
    for k in tl.static_range(COLUMNS + 1):
        at = (t - (COLUMNS - k))[:, None]
        tap = tl.load(weight + channels.to(tl.int64) * weight_row + k, mask=there, other=0.0).to(tl.float32)
        seen = tl.load(x + at * x_row + channels[None, :], mask=real & (at >= start), other=0.0).to(tl.float32)
        if k < COLUMNS:
            position = at - start + before
            old = real & (at < start) & (position >= 0)
            seen += tl.load(kept + position % KEPT * CHANNELS, mask=old, other=0.0)
        total += seen * tap[None, :]
    if BIASED:
        total += tl.load(bias + channels, mask=there, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + t[:, None] * CHANNELS + channels[None, :], total.to(out.dtype.element_ty), mask=real)
    if KEPT > 0 and first == start:
        columns = tl.arange(0, PADDED)[:, None]
        place = end - KEPT + columns
        written = (columns < KEPT) & (place >= start) & there[None, :]
        newest = tl.load(x + place * x_row + channels[None, :], mask=written, other=0.0)
        tl.debug_barrier()  # other threads of this program read the old state above
        tl.store(kept + (place - start + before) % KEPT * CHANNELS, newest.to(tl.float32), mask=written)


def delta_chunks(
    qkv: Tensor, gates: Gates, state: Tensor, batch: Rows, sizes: DeltaSizes, eps: float, out: Tensor
) -> None:
    """gated_delta of the sequences behind the first num_decodes, into out [T, value heads, value dim]. All tensors are
    those of the whole step. eps: of the norm of queries and keys."""
    b, a, heads = gates.b, gates.a, sizes.value_heads
    assert qkv.stride(1) == b.stride(1) == a.stride(1) == 1 and state.is_contiguous() and out.is_contiguous()
    decodes = batch.num_decodes
    assert batch.query_len <= CHUNK
    table = chunk_table(batch)  # of those that decode, too: one chunk each
    key, value = (triton.next_power_of_2(max(n, 16)) for n in (sizes.key_dim, sizes.value_dim))
    exact = qkv.dtype == torch.float32
    precision = "tf32x3" if exact else "tf32"  # three GEMMs of TF32 are about as exact as one of f32
    columns, warps = STATE_F32 if exact else STATE_16_BITS

    def scratch(*shape: int, dtype: torch.dtype = qkv.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=qkv.device)

    tokens = len(qkv)
    u, w = scratch(tokens, heads, sizes.value_dim), scratch(tokens, heads, sizes.key_dim)
    within, factors = scratch(tokens, heads, CHUNK), scratch(3, tokens, heads, dtype=torch.float32)
    shape = sizes.key_heads, heads, sizes.key_dim, sizes.value_dim, key
    system_kernel[len(table) - decodes, heads](
        qkv, b, a, gates.A_log, gates.dt_bias, batch.query_starts, table, u, w, within, factors, decodes,
        qkv.stride(0), b.stride(0), a.stride(0), factors.stride(0), eps, sizes.key_dim**-0.5,
        *shape, value, CHUNK, BLOCK, precision, num_warps=SYSTEM_WARPS, num_stages=1,
    )  # fmt: skip
    columns = min(columns, value)
    state_kernel[len(batch.query_lens) - decodes, heads, triton.cdiv(sizes.value_dim, columns)](
        qkv, u, w, within, factors, batch.rows, batch.lengths, batch.query_starts, state, out, decodes,
        qkv.stride(0), factors.stride(0), *shape, columns, state.shape[1], CHUNK, precision, num_warps=warps,
        num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def system_kernel(
    qkv, b, a, a_log, dt_bias, starts, table, u, w, within, factors, decodes,
    qkv_row, b_row, a_row, factors_row, eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of one chunk and value head that needs no state before it. KEYS and VALUES: the padded sizes.

    The tokens' writes are (I + A)^-1 diag(beta) (V - diag(exp(total)) K S), of which u is the first part and w S the
    second. factors: of a query's reading of S, of a key's writing into it, and what is left of S after the chunk.
    """
    dtype = qkv.dtype.element_ty
    chunk = table + 2 * (decodes + tl.program_id(0))
    end = tl.load(starts + tl.load(chunk) + 1)
    places, head = tl.arange(0, TOKENS), tl.program_id(1)
    t = tl.load(chunk + 1).to(tl.int64) + places
    real = t < end
    q, k = load_keys(qkv, t, real, head, qkv_row, KEY_HEADS, VALUE_HEADS, KEY, KEYS)
    q_wide, k_wide = q.to(tl.float32), k.to(tl.float32)
    q_norm = tl.rsqrt(tl.sum(q_wide * q_wide, 1) + eps) * scale
    k_norm = tl.rsqrt(tl.sum(k_wide * k_wide, 1) + eps)
    g = log_decay(tl.load(a + t * a_row + head, mask=real, other=0.0), tl.load(a_log + head), tl.load(dt_bias + head))
    g = tl.where(real, g, 0.0)
    total = tl.cumsum(g, 0)
    beta = tl.where(real, sigmoid(tl.load(b + t * b_row + head, mask=real, other=0.0)), 0.0)

    lower = places[:, None] >= places[None, :]
    decay = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)
    decay *= k_norm[None, :]
    mine = t * VALUE_HEADS + head
    reads = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay * q_norm[:, None]
    tl.store(within + mine[:, None] * TOKENS + places[None, :], reads.to(dtype), mask=real[:, None])
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * (beta * k_norm)[:, None]
    system = tl.where(places[:, None] > places[None, :], system, 0.0)
    inverse = invert(system, TOKENS, BLOCK, PRECISION)

    columns, dims = tl.arange(0, VALUES), tl.arange(0, KEYS)
    mask = real[:, None] & (columns < VALUE)[None, :]
    v_at = qkv + (t * qkv_row)[:, None] + 2 * KEY_HEADS * KEY + head * VALUE + columns[None, :]
    v = tl.load(v_at, mask=mask, other=0.0)
    own = tl.dot((inverse * beta[None, :]).to(dtype), v, input_precision=PRECISION)
    tl.store(u + mine[:, None] * VALUE + columns[None, :], own.to(dtype), mask=mask)
    read = tl.dot((inverse * (beta * k_norm * tl.exp(total))[None, :]).to(dtype), k, input_precision=PRECISION)
    tl.store(w + mine[:, None] * KEY + dims[None, :], read.to(dtype), mask=real[:, None] & (dims < KEY)[None, :])
    last = tl.sum(g, 0)
    tl.store(factors + mine, q_norm * tl.exp(total), mask=real)
    tl.store(factors + factors_row + mine, k_norm * tl.exp(last - total), mask=real)
    tl.store(factors + 2 * factors_row + mine, tl.exp(last) + 0.0 * total, mask=real)


@triton.jit
def load_keys(
    qkv, t, real, head, qkv_row,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Queries and keys of a chunk as they lie, [TOKENS, KEYS]."""
    dims = tl.arange(0, KEYS)
    at = qkv + (t * qkv_row)[:, None] + head // (VALUE_HEADS // KEY_HEADS) * KEY + dims[None, :]
    mask = real[:, None] & (dims < KEY)[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + KEY_HEADS * KEY, mask=mask, other=0.0)


@triton.jit
def invert(system, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + system)^-1 of a strictly lower triangular system [TOKENS, TOKENS], f32.

    The diagonal blocks are inverted row by row, all at once: a column belongs to one block, so a sum over all rows
    reads the column's own. With D their inverse and L the system below them the inverse is (I + DL)^-1 D, and (DL)^4 is
    zero as there are four blocks. A sum of powers of the whole system would be short code, too, but equal keys make
    these so large that nothing is left of the result.
    """
    tl.static_assert(TOKENS == 4 * BLOCK)
    places = tl.arange(0, TOKENS)
    rows, columns = places[:, None], places[None, :]
    diagonal = rows // BLOCK == columns // BLOCK
    unit = tl.where(rows == columns, 1.0, 0.0)
    blocks = tl.where(diagonal, system, 0.0)
    inverse = unit
    for i in range(1, BLOCK):
        newest = rows % BLOCK == i
        taps = tl.sum(tl.where(newest, blocks, 0.0), 0)
        row = tl.sum(taps[:, None] * inverse, 0)
        inverse = tl.where(newest & diagonal & (columns < rows), -row[None, :], inverse)
    below = -tl.dot(inverse, system - blocks, input_precision=PRECISION)
    squared = tl.dot(below, below, input_precision=PRECISION)
    powers = unit + below + squared + tl.dot(below, squared, input_precision=PRECISION)
    return tl.dot(powers, inverse, input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def state_kernel(
    qkv, u, w, within, factors, rows, lengths, starts, state, out, decodes, qkv_row, factors_row,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, ENTRIES: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """VALUES columns of one value head's state through all chunks of one sequence. ENTRIES: of the states' ring."""
    dtype = qkv.dtype.element_ty
    sequence, head = decodes + tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    places, dims = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    there, keys = columns < VALUE, dims < KEY
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    length = tl.load(lengths + sequence).to(tl.int64)
    before = length - (end - start)  # 0: it begins here, whatever its row holds
    base = state + (tl.load(rows + sequence) * ENTRIES * VALUE_HEADS + head) * (KEY * VALUE)
    at = base + dims[:, None] * VALUE + columns[None, :]
    mask = keys[:, None] & there[None, :]
    entry: tl.constexpr = VALUE_HEADS * KEY * VALUE
    s = tl.load(at + (before + ENTRIES - 1) % ENTRIES * entry, mask=mask & (before > 0), other=0.0)
    for first in range(start, end, TOKENS):
        t = first + places
        real = t < end
        mine = t * VALUE_HEADS + head
        q, k = load_keys(qkv, t, real, head, qkv_row, KEY_HEADS, VALUE_HEADS, KEY, KEYS)
        read = tl.load(w + mine[:, None] * KEY + dims[None, :], mask=real[:, None] & keys[None, :], other=0.0)
        q_scale = tl.load(factors + mine, mask=real, other=0.0)
        k_scale = tl.load(factors + factors_row + mine, mask=real, other=0.0)
        left = tl.load(factors + 2 * factors_row + first * VALUE_HEADS + head)
        values = mine[:, None] * VALUE + columns[None, :]
        whole = real[:, None] & there[None, :]
        kept = s.to(dtype)
        new = tl.load(u + values, mask=whole, other=0.0).to(tl.float32)
        new -= tl.dot(read, kept, input_precision=PRECISION)
        o = tl.dot(q, kept, input_precision=PRECISION) * q_scale[:, None]
        earlier = tl.load(within + mine[:, None] * TOKENS + places[None, :], mask=real[:, None], other=0.0)
        o += tl.dot(earlier, new.to(dtype), input_precision=PRECISION)
        tl.store(out + values, o.to(dtype), mask=whole)
        s = s * left + tl.dot(tl.trans(k), (new * k_scale[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(at + (length - 1) % ENTRIES * entry, s, mask=mask)
