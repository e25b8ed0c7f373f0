"""Prompts of the gated delta net on GPUs, in Triton (gated_delta.py documents the computation): chunks of CHUNK tokens.

Chunks first compute what needs no state, all at once: the inverse of their triangular system, and with it what each
token writes (`u`) and reads of the state before the chunk (`w`). Then a program for some columns of each state goes
through its sequence's chunks. Norms of queries and keys and decays are factors of rows, so that they are multiplied in
f32, and tensor cores get queries and keys as they lie. Where each channel has its decay, queries and keys are decayed
before they are multiplied, in blocks of BLOCK tokens (`pairs_kernel`), and are kept so for the states. GEMMs take
inputs of the step's dtype and sum in f32.

What is kept between the two kernels has an entry for each token, so chunks that are not full cost no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated_delta import BLOCK, CHUNK
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
    assert gates.each > 1 or not gates.floor
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
    within = scratch(tokens, heads, CHUNK)
    shape = sizes.key_heads, heads, sizes.key_dim, sizes.value_dim, key
    grid, channels = (len(table) - decodes, heads), gates.each > 1
    given = gates.A_log, gates.dt_bias, batch.query_starts, table
    strides = qkv.stride(0), b.stride(0), a.stride(0)
    if channels:
        system = scratch(tokens, heads, CHUNK, dtype=torch.float32)
        factors = scratch(tokens, heads, sizes.key_dim, dtype=torch.float32)
        keys = scratch(tokens, 2, heads, sizes.key_dim)
        pairs_kernel[*grid, CHUNK // BLOCK](
            qkv, b, a, *given, keys, w, within, system, factors, decodes, *strides, eps, sizes.key_dim**-0.5,
            *shape, CHUNK, BLOCK, precision, float(gates.floor), num_warps=4, num_stages=1,
        )  # fmt: skip
        solve_kernel[grid](
            qkv, b, batch.query_starts, table, u, w, system, decodes, qkv.stride(0), b.stride(0),
            *shape, value, CHUNK, BLOCK, precision, num_warps=SYSTEM_WARPS, num_stages=1,
        )  # fmt: skip
    else:
        keys, factors = qkv, scratch(3, tokens, heads, dtype=torch.float32)
        system_kernel[grid](
            qkv, b, a, *given, u, w, within, factors, decodes, *strides, factors.stride(0), eps, sizes.key_dim**-0.5,
            *shape, value, CHUNK, BLOCK, precision, num_warps=SYSTEM_WARPS, num_stages=1,
        )  # fmt: skip
    columns = min(columns, value)
    shape = (heads if channels else sizes.key_heads), *shape[1:]
    state_kernel[len(batch.query_lens) - decodes, heads, triton.cdiv(sizes.value_dim, columns)](
        keys, u, w, within, factors, batch.rows, batch.lengths, batch.query_starts, state, out, decodes,
        keys.stride(0), factors.stride(0), *shape, columns, state.shape[1], CHUNK, precision, channels, num_warps=warps,
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
    step, bias = tl.load(a + t * a_row + head, mask=real, other=0.0), tl.load(dt_bias + head)
    g = log_decay(step, tl.load(a_log + head), bias, 0.0)
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
    write_values(
        qkv, u, inverse * beta[None, :], t, real, head, qkv_row, KEY_HEADS, VALUE_HEADS, KEY, VALUE, VALUES, PRECISION
    )
    dims = tl.arange(0, KEYS)
    read = tl.dot((inverse * (beta * k_norm * tl.exp(total))[None, :]).to(dtype), k, input_precision=PRECISION)
    tl.store(w + mine[:, None] * KEY + dims[None, :], read.to(dtype), mask=real[:, None] & (dims < KEY)[None, :])
    last = tl.sum(g, 0)
    tl.store(factors + mine, q_norm * tl.exp(total), mask=real)
    tl.store(factors + factors_row + mine, k_norm * tl.exp(last - total), mask=real)
    tl.store(factors + 2 * factors_row + mine, tl.exp(last) + 0.0 * total, mask=real)


@triton.jit
def write_values(
    qkv, u, by, t, real, head, qkv_row,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """u of a chunk: its values multiplied by a matrix [TOKENS, TOKENS]."""
    dtype = qkv.dtype.element_ty
    columns = tl.arange(0, VALUES)
    mask = real[:, None] & (columns < VALUE)[None, :]
    v_at = qkv + (t * qkv_row)[:, None] + 2 * KEY_HEADS * KEY + head * VALUE + columns[None, :]
    v = tl.load(v_at, mask=mask, other=0.0)
    own = tl.dot(by.to(dtype), v, input_precision=PRECISION)
    tl.store(u + (t * VALUE_HEADS + head)[:, None] * VALUE + columns[None, :], own.to(dtype), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def pairs_kernel(
    qkv, b, a, a_log, dt_bias, starts, table, keys, w, within, system, factors, decodes, qkv_row, b_row, a_row,
    eps, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Rows of `within` and of the system for one block of a chunk and one value head, where each channel has its decay.

    Decays are sums of g and no differences of sums, as `decayed` in gated_delta.py has them. keys [T, 2, heads, key]:
    queries decayed from the chunk's start, and keys to its end; w: keys from its start, times beta; factors [T, heads,
    key]: for a chunk's first token what is left of S after the chunk.
    """
    dtype = qkv.dtype.element_ty
    chunk = table + 2 * (decodes + tl.program_id(0))
    head, block = tl.program_id(1), tl.program_id(2)
    end = tl.load(starts + tl.load(chunk) + 1)
    start = tl.load(chunk + 1).to(tl.int64)
    t = start + block * BLOCK + tl.arange(0, BLOCK)
    real = t < end
    if start + block * BLOCK < end:
        dims, places = tl.arange(0, KEYS), tl.arange(0, BLOCK)
        there = real[:, None] & (dims < KEY)[None, :]
        q, k = load_keys(qkv, t, real, head, qkv_row, KEY_HEADS, VALUE_HEADS, KEY, KEYS)
        q, k = normed(q, eps) * scale, normed(k, eps)
        beta = sigmoid(tl.load(b + t * b_row + head, mask=real, other=0.0))[:, None]
        g = channel_decays(a, a_log, dt_bias, t, real, head, a_row, KEY, KEYS, FLOOR)
        upto = tl.cumsum(g, 0)
        mine = t * VALUE_HEADS + head
        row = mine[:, None] * TOKENS + block * BLOCK + places[None, :]

        reads, products = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
        since = tl.zeros([BLOCK, KEYS], tl.float32)  # decays from token j to each
        rows = places[:, None]
        for i in range(BLOCK):
            j = BLOCK - 1 - i
            since += tl.sum(tl.where(rows == j + 1, g, 0.0), 0)[None, :]
            since = tl.where(rows > j, since, 0.0)
            key = tl.sum(tl.where(rows == j, k, 0.0), 0)[None, :]
            key = tl.where(rows >= j, key * tl.exp(since), 0.0)
            column = places[None, :] == j
            reads = tl.where(column, tl.sum(q * key, 1)[:, None], reads)
            products = tl.where(column, tl.sum(k * key, 1)[:, None], products)
        tl.store(within + row, reads.to(dtype), mask=real[:, None])
        tl.store(system + row, products * beta, mask=real[:, None])

        decayed = tl.exp(upto)
        q, written = q * decayed, k * decayed * beta
        before = tl.zeros([KEYS], tl.float32)  # decays of the blocks between
        for i in range(block):
            other = block - 1 - i
            earlier = start + other * BLOCK + places
            all_real = earlier < end
            _, k_raw = load_keys(qkv, earlier, all_real, head, qkv_row, KEY_HEADS, VALUE_HEADS, KEY, KEYS)
            g_other = channel_decays(a, a_log, dt_bias, earlier, all_real, head, a_row, KEY, KEYS, FLOOR)
            k_other = tl.trans((normed(k_raw, eps) * tl.exp(behind(g_other, BLOCK) + before[None, :])).to(dtype))
            at = mine[:, None] * TOKENS + other * BLOCK + places[None, :]
            reads = tl.dot(q.to(dtype), k_other, input_precision=PRECISION)
            tl.store(within + at, reads.to(dtype), mask=real[:, None])
            products = tl.dot(written.to(dtype), k_other, input_precision=PRECISION)
            tl.store(system + at, products, mask=real[:, None])
            before += tl.sum(g_other, 0)
        after = tl.zeros([KEYS], tl.float32)
        for other in range(block + 1, TOKENS // BLOCK):
            later = start + other * BLOCK + places
            after += tl.sum(channel_decays(a, a_log, dt_bias, later, later < end, head, a_row, KEY, KEYS, FLOOR), 0)
            at = mine[:, None] * TOKENS + other * BLOCK + places[None, :]
            tl.store(within + at, tl.zeros([BLOCK, BLOCK], tl.float32).to(dtype), mask=real[:, None])

        whole = tl.exp(before)[None, :]
        of_key = mine[:, None] * KEY + dims[None, :]
        tl.store(w + of_key, (written * whole).to(dtype), mask=there)
        pair = keys + ((2 * t * VALUE_HEADS + head) * KEY)[:, None] + dims[None, :]
        tl.store(pair, (q * whole).to(dtype), mask=there)
        tl.store(pair + VALUE_HEADS * KEY, (k * tl.exp(behind(g, BLOCK) + after[None, :])).to(dtype), mask=there)
        if block == 0:
            left = tl.exp(tl.sum(g, 0) + after)
            tl.store(factors + (start * VALUE_HEADS + head) * KEY + dims, left, mask=dims < KEY)


@triton.jit
def normed(x, eps):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]


@triton.jit
def channel_decays(
    a, a_log, dt_bias, t, real, head, a_row, KEY: tl.constexpr, KEYS: tl.constexpr, FLOOR: tl.constexpr
):  # fmt: skip
    """g [tokens, KEYS]; 0 where there is no token."""
    dims = tl.arange(0, KEYS)
    there = real[:, None] & (dims < KEY)[None, :]
    step = tl.load(a + (t * a_row + head * KEY)[:, None] + dims[None, :], mask=there, other=0.0)
    bias = tl.load(dt_bias + head * KEY + dims, mask=dims < KEY, other=0.0)
    return tl.where(there, log_decay(step, tl.load(a_log + head), bias[None, :], FLOOR), 0.0)


@triton.jit
def behind(g, BLOCK: tl.constexpr):
    """Sums of g [BLOCK, KEYS] over the tokens behind each."""
    places = tl.arange(0, BLOCK)
    later = places[:, None] < places[None, :]
    return tl.dot(later.to(tl.float32), g, input_precision="ieee")


@triton.jit(do_not_specialize=VARYING)
def solve_kernel(
    qkv, b, starts, table, u, w, system, decodes, qkv_row, b_row,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u and w of one chunk and value head by the system of `pairs_kernel`. w: what it has left there, replaced."""
    dtype = qkv.dtype.element_ty
    chunk = table + 2 * (decodes + tl.program_id(0))
    end = tl.load(starts + tl.load(chunk) + 1)
    places, head, dims = tl.arange(0, TOKENS), tl.program_id(1), tl.arange(0, KEYS)
    t = tl.load(chunk + 1).to(tl.int64) + places
    real = t < end
    mine = t * VALUE_HEADS + head
    earlier = real[:, None] & (places[:, None] > places[None, :])
    made = tl.load(system + mine[:, None] * TOKENS + places[None, :], mask=earlier, other=0.0)
    inverse = invert(made, TOKENS, BLOCK, PRECISION)
    beta = tl.where(real, sigmoid(tl.load(b + t * b_row + head, mask=real, other=0.0)), 0.0)
    write_values(
        qkv, u, inverse * beta[None, :], t, real, head, qkv_row, KEY_HEADS, VALUE_HEADS, KEY, VALUE, VALUES, PRECISION
    )
    at, mask = w + mine[:, None] * KEY + dims[None, :], real[:, None] & (dims < KEY)[None, :]
    read = tl.dot(inverse.to(dtype), tl.load(at, mask=mask, other=0.0), input_precision=PRECISION)
    tl.store(at, read.to(dtype), mask=mask)


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
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """VALUES columns of one value head's state through all chunks of one sequence. ENTRIES: of the states' ring.
    CHANNELS: queries and keys are those that `pairs_kernel` has decayed, and factors are each channel's."""
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
        values = mine[:, None] * VALUE + columns[None, :]
        whole = real[:, None] & there[None, :]
        kept = s.to(dtype)
        new = tl.load(u + values, mask=whole, other=0.0).to(tl.float32)
        new -= tl.dot(read, kept, input_precision=PRECISION)
        o = tl.dot(q, kept, input_precision=PRECISION)
        if not CHANNELS:
            o *= tl.load(factors + mine, mask=real, other=0.0)[:, None]
        earlier = tl.load(within + mine[:, None] * TOKENS + places[None, :], mask=real[:, None], other=0.0)
        o += tl.dot(earlier, new.to(dtype), input_precision=PRECISION)
        tl.store(out + values, o.to(dtype), mask=whole)
        if CHANNELS:
            s *= tl.load(factors + (first * VALUE_HEADS + head) * KEY + dims, mask=keys, other=0.0)[:, None]
        else:
            s *= tl.load(factors + 2 * factors_row + first * VALUE_HEADS + head)
            new *= tl.load(factors + factors_row + mine, mask=real, other=0.0)[:, None]
        s += tl.dot(tl.trans(k), new.to(dtype), input_precision=PRECISION)
    tl.store(at + (length - 1) % ENTRIES * entry, s, mask=mask)
