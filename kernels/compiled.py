"""Steps of a few rows in f32 on one core, compiled by Numba: what `one_core` of kernels/cpu.py hands to the operations.

A lone token's step reads all weights once, and between two products the caches hold nothing else: every call of
torch's runs through code that has to come from memory again. Here an operation is one short loop. Sums may be
reordered and contracted, so that they are computed in vectors; infinities and NaNs stay what they are.
"""

from __future__ import annotations

import numba
import numpy as np

from .compiler import LINES, compiled, dots, load, store

F = np.float32
LOG2_E, LN2_HIGH, LN2_LOW = F(1.4426950408889634), F(0.693359375), F(-2.12194440e-4)
# exp(r) on |r| <= ln(2) / 2: Taylor's coefficients, below half a unit in the last place of f32.
C2, C3, C4, C5, C6, C7 = (F(1 / n) for n in (2, 6, 24, 120, 720, 5040))


@numba.njit(inline="always")
def _exp(x):
    """e ** x for x <= 88 in f32; e ** -87, next to nothing, below that: loops of it are vectors, without a branch."""
    x = max(x, F(-87.0))
    n = np.floor(x * LOG2_E + F(0.5))
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = F(1) + r * (F(1) + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * (C6 + r * C7))))))
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(F)


@compiled("f4[:,::1], f4[:,::1], f4[:,::1], i8, i8, i8")
def _four_by_four(x, weight, y, m, o, inputs):
    a0, a1, a2, a3, b0, b1, b2, b3 = F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0)
    c0, c1, c2, c3, d0, d1, d2, d3 = F(0), F(0), F(0), F(0), F(0), F(0), F(0), F(0)
    for i in range(inputs):
        w0, w1, w2, w3 = weight[o, i], weight[o + 1, i], weight[o + 2, i], weight[o + 3, i]
        p, q, r, s = x[m, i], x[m + 1, i], x[m + 2, i], x[m + 3, i]
        a0 += p * w0
        a1 += p * w1
        a2 += p * w2
        a3 += p * w3
        b0 += q * w0
        b1 += q * w1
        b2 += q * w2
        b3 += q * w3
        c0 += r * w0
        c1 += r * w1
        c2 += r * w2
        c3 += r * w3
        d0 += s * w0
        d1 += s * w1
        d2 += s * w2
        d3 += s * w3
    y[m, o], y[m, o + 1], y[m, o + 2], y[m, o + 3] = a0, a1, a2, a3
    y[m + 1, o], y[m + 1, o + 1], y[m + 1, o + 2], y[m + 1, o + 3] = b0, b1, b2, b3
    y[m + 2, o], y[m + 2, o + 1], y[m + 2, o + 2], y[m + 2, o + 3] = c0, c1, c2, c3
    y[m + 3, o], y[m + 3, o + 1], y[m + 3, o + 2], y[m + 3, o + 3] = d0, d1, d2, d3


@compiled("f4[:,::1], f4[:,::1], f4[:,::1]")
def linear(x, weight, y):
    """y [M, O] = x [M, I] times the transpose of weight [O, I]: four outputs at a time, of up to four rows."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    whole = outputs - outputs % 4
    for o in range(0, whole, 4):
        m = 0
        while m + 4 <= rows:
            _four_by_four(x, weight, y, m, o, inputs)
            m += 4
        while m < rows and inputs % LINES == 0:
            y[m, o], y[m, o + 1], y[m, o + 2], y[m, o + 3] = dots(x, m, weight, o, inputs)
            m += 1
        while m < rows:
            a, b, c, d = F(0), F(0), F(0), F(0)
            for i in range(inputs):
                v = x[m, i]
                a += v * weight[o, i]
                b += v * weight[o + 1, i]
                c += v * weight[o + 2, i]
                d += v * weight[o + 3, i]
            y[m, o], y[m, o + 1], y[m, o + 2], y[m, o + 3] = a, b, c, d
            m += 1
    for o in range(whole, outputs):
        for m in range(rows):
            a = F(0)
            for i in range(inputs):
                a += x[m, i] * weight[o, i]
            y[m, o] = a


@compiled("i8[::1], f4[:,::1], i8, f4[:,::1]")
def embedding(ids, weight, start, y):
    """y[t] = weight[ids[t] - start], zeros where there is no such row."""
    for t in range(len(ids)):
        row = ids[t] - start
        here = 0 <= row < weight.shape[0]
        for i in range(weight.shape[1]):
            y[t, i] = weight[row, i] if here else F(0)


@compiled("f4[:,:,::1], i8[::1], f4[:,:,:,::1]")
def rotation(table, positions, turn):
    """turn [2, T, 1, r]: cosines and sines of kernels/rope.py's Rotation."""
    half = table.shape[2]
    for t in range(len(positions)):
        for i in range(half):
            cos, sin = table[positions[t], 0, i], table[positions[t], 1, i]
            turn[0, t, 0, i], turn[0, t, 0, half + i] = cos, cos
            turn[1, t, 0, i], turn[1, t, 0, half + i] = -sin, sin


@compiled("f4[:,::1], f4[::1], f4, f4[:,::1]")
def rms_norm(x, weight, eps, y):
    """y = x / rms(x) * weight, rows [T, H]; y may be x."""
    for t in range(x.shape[0]):
        total = F(0)
        for i in range(x.shape[1]):
            total += x[t, i] * x[t, i]
        scale = F(1) / np.sqrt(total / F(x.shape[1]) + F(eps))
        for i in range(x.shape[1]):
            y[t, i] = x[t, i] * scale * weight[i]


@compiled("f4[:,::1], f4[:,::1], f4[::1], f4")
def add_rms_norm(x, residual, weight, eps):
    """residual += x, then x = the norm of it."""
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            residual[t, i] += x[t, i]
    rms_norm(residual, weight, eps, x)


@compiled("f4[:,::1], f4[:,::1]")
def silu_mul(x, y):
    """y [T, I] = silu(gate) * up of x [T, 2 I]."""
    half = y.shape[1]
    for t in range(x.shape[0]):
        for i in range(half):
            gate = x[t, i]
            y[t, i] = gate / (F(1) + _exp(min(-gate, F(88)))) * x[t, half + i]


@compiled("f4[::1], i8, i8, i8, f4[:,:,::1], f4[:,:,::1], f4[::1], f4")
def _turn(x, row, heads, dim, cos, sin, weight, eps):
    """Heads of x, normed unless weight [dim] is empty, and turned by cos, sin [T, 1, r], in place.

    A token's heads begin at a multiple of `row` in x, and lie side by side.
    """
    half = cos.shape[2] // 2
    for t in range(cos.shape[0]):
        for h in range(heads):
            at = t * row + h * dim
            head = x[at : at + dim]
            if len(weight):
                total = F(0)
                for i in range(dim):
                    total += head[i] * head[i]
                scale = F(1) / np.sqrt(total / F(dim) + F(eps))
                for i in range(dim):
                    head[i] *= scale * weight[i]
            for i in range(half):
                a, b = head[i], head[half + i]
                head[i] = a * cos[t, 0, i] + b * sin[t, 0, i]
                head[half + i] = b * cos[t, 0, half + i] + a * sin[t, 0, half + i]


@compiled("f4[::1], i8, f4[:,::1], i8[::1]")
def _write(x, row, cache, slots):
    """cache [slots, width]: at each of `slots` what x has from a multiple of `row` on."""
    for t in range(len(slots)):
        for i in range(cache.shape[1]):
            cache[slots[t], i] = x[t * row + i]


@compiled(
    "f4[::1], f4[::1], f4[::1], i8, i8, i8, i8, i8, i8, f4[:,:,::1], f4[:,:,::1], f4[::1], f4[::1], f4, f4[:,::1], "
    "f4[:,::1], i8[::1]"
)
def rope_write(
    q, k, v, q_row, k_row, v_row, heads, kv_heads, dim, cos, sin, q_weight, k_weight, eps, keys, values, slots
):
    """q and k are turned, k and v written to `slots` of keys, values [slots, kv_heads * dim]."""
    _turn(q, q_row, heads, dim, cos, sin, q_weight, eps)
    _turn(k, k_row, kv_heads, dim, cos, sin, k_weight, eps)
    _write(k, k_row, keys, slots)
    _write(v, v_row, values, slots)


@compiled("f4[::1]")
def _softmax(scores):
    top = scores[0]
    for i in range(len(scores)):
        top = max(top, scores[i])
    total = F(0)
    for i in range(len(scores)):
        scores[i] = _exp(scores[i] - top)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total


@compiled("f4[::1], f4[:,:,:,::1], i8, i8, i8, i8, f4, f4[::1]")
def _score(query, keys, block, offset, count, kv, scale, scores):
    """query [dim] with `count` keys of a block, of key head kv; four at a time, as each of the query is loaded once."""
    i = 0
    while i + 4 <= count:
        k0, k1 = keys[block, offset + i, kv], keys[block, offset + i + 1, kv]
        k2, k3 = keys[block, offset + i + 2, kv], keys[block, offset + i + 3, kv]
        a, b, c, d = F(0), F(0), F(0), F(0)
        for j in range(len(query)):
            a += query[j] * k0[j]
            b += query[j] * k1[j]
            c += query[j] * k2[j]
            d += query[j] * k3[j]
        scores[i], scores[i + 1], scores[i + 2], scores[i + 3] = a * scale, b * scale, c * scale, d * scale
        i += 4
    while i < count:
        key = keys[block, offset + i, kv]
        a = F(0)
        for j in range(len(query)):
            a += query[j] * key[j]
        scores[i] = a * scale
        i += 1


@compiled("f4[::1], f4[:,:,:,::1], i8, i8, i8, i8, f4[::1]")
def _mix(weights, values, block, offset, count, kv, out):
    """out [dim] += `count` values of a block, of key head kv, by their weights."""
    i = 0
    while i + 4 <= count:
        v0, v1 = values[block, offset + i, kv], values[block, offset + i + 1, kv]
        v2, v3 = values[block, offset + i + 2, kv], values[block, offset + i + 3, kv]
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for j in range(len(out)):
            out[j] += a * v0[j] + b * v1[j] + c * v2[j] + d * v3[j]
        i += 4
    while i < count:
        value, a = values[block, offset + i, kv], weights[i]
        for j in range(len(out)):
            out[j] += a * value[j]
        i += 1


@compiled("f4[::1], i8, f4[:,:,:,::1], f4[:,:,:,::1], i4[:,::1], i4[::1], f4, i8, f4[:,:,::1]")
def attend(q, row, keys, values, tables, lengths, scale, window, out):
    """One token of each of n sequences: out [n, heads, dim]; keys, values [blocks, block_size, kv_heads, dim].

    A token's query heads begin at a multiple of `row` in q, and lie side by side.
    """
    n, heads, dim = out.shape
    size, kv_heads = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    scores = np.empty((group, lengths[:n].max()), np.float32)
    for b in range(n):
        first = max(lengths[b] - window, 0) if window else 0
        count = lengths[b] - first
        for kv in range(kv_heads):
            i = 0
            while i < count:
                block, offset = tables[b, (first + i) // size], (first + i) % size
                here = min(size - offset, count - i)
                for g in range(group):
                    at = b * row + (kv * group + g) * dim
                    _score(q[at : at + dim], keys, block, offset, here, kv, scale, scores[g, i:])
                i += here
            for g in range(group):
                _softmax(scores[g, :count])
                out[b, kv * group + g][:] = F(0)
            i = 0
            while i < count:
                block, offset = tables[b, (first + i) // size], (first + i) % size
                here = min(size - offset, count - i)
                for g in range(group):
                    _mix(scores[g, i:], values, block, offset, here, kv, out[b, kv * group + g])
                i += here


LOOKS = 100_000  # for another rank, some tens of microseconds


@compiled("f4[::1], f4[:,:,::1], i8[::1], i8, i8", "b1")
def all_reduce(x, slots, counts, rank, call):
    """x = the sum of all ranks' x in this call; False: some are not here yet, and the same has to be called again.

    slots [2, ranks, most elements] and counts [ranks lines] are shared by the ranks, which count their calls.
    """
    parts, ranks = slots[call & 1], slots.shape[1]
    for i in range(len(x)):
        parts[rank, i] = x[i]
    store(counts, rank * (len(counts) // ranks), call)
    for other in range(ranks):
        looks = 0
        while load(counts, other * (len(counts) // ranks)) < call:
            looks += 1
            if looks == LOOKS:
                return False
    for i in range(len(x)):
        x[i] = parts[0, i]
    for other in range(1, ranks):
        for i in range(len(x)):
            x[i] += parts[other, i]
    return True


@compiled("f4[:,::1], f4[:,::1], f4[::1], f4, f4[:,:,::1], i8[::1], i8, i8", "b1")
def all_reduce_add_norm(x, residual, weight, eps, slots, counts, rank, call):
    """add_rms_norm of the sum of all ranks' x."""
    here = all_reduce(x.reshape(-1), slots, counts, rank, call)
    if here:
        add_rms_norm(x, residual, weight, eps)
    return here


@compiled(
    "f4[:,::1], f4[:,::1], f4[::1], f4, f4[:,::1], i8, i8, i8, f4[:,::1], f4[:,:,:,::1], f4[:,:,:,::1], f4, i8, "
    "f4[::1], f4[::1], f4, f4[:,:,::1], f4[:,:,::1], i8[::1], i4[:,::1], i4[::1], f4[:,:,::1], i8[::1], i8, i8",
    "b1",
)
def attention(
    x, residual, weight, epsilon, qkv_weight, heads, kv_heads, dim, out_weight, keys, values, scale, window, q_weight,
    k_weight, eps, cos, sin, slots, tables, lengths, board, counts, rank, call
):  # fmt: skip
    """A layer's half of decoding rows: x = what they attend to times out_weight, where qkv_weight makes q, k and v.

    Before, all_reduce_add_norm of x, unless `call` is 0.
    """
    if call and not all_reduce_add_norm(x, residual, weight, epsilon, board, counts, rank, call):
        return False
    tokens, row = x.shape[0], qkv_weight.shape[0]
    qkv = np.empty((tokens, row), np.float32)
    linear(x, qkv_weight, qkv)
    q = qkv.reshape(-1)
    k, v = q[heads * dim :], q[(heads + kv_heads) * dim :]
    key_rows, value_rows = keys.reshape(-1, kv_heads * dim), values.reshape(-1, kv_heads * dim)
    rope_write(
        q, k, v, row, row, row, heads, kv_heads, dim, cos, sin, q_weight, k_weight, eps, key_rows, value_rows, slots
    )
    out = np.empty((tokens, heads, dim), np.float32)
    attend(q, row, keys, values, tables, lengths, scale, window, out)
    linear(out.reshape(tokens, heads * dim), out_weight, x)
    return True


@compiled("f4[:,::1], f4[:,::1], f4[::1], f4, f4[:,::1], f4[:,::1], f4[:,:,::1], i8[::1], i8, i8", "b1")
def feed_forward(x, residual, weight, eps, gate_up_weight, down_weight, board, counts, rank, call):
    """A layer's other half, in the same way."""
    if call and not all_reduce_add_norm(x, residual, weight, eps, board, counts, rank, call):
        return False
    both = np.empty((x.shape[0], gate_up_weight.shape[0]), np.float32)
    linear(x, gate_up_weight, both)
    inner = np.empty((x.shape[0], gate_up_weight.shape[0] // 2), np.float32)
    silu_mul(both, inner)
    linear(inner, down_weight, x)
    return True
