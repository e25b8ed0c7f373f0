"""Decoding sequences on CPUs: cpu_decode.cpp."""

from __future__ import annotations

import torch

from ..candidate import Candidate
from ..cpp import ops
from ..rope.fp8_cache import E4M3
from .backend import Part

MAX_DIM = 512  # as in cpu_decode.cpp


def supports(part: Part) -> bool:
    q, keys, dim = part.q, part.keys, part.q.shape[2]
    if not part.decodes or dim > MAX_DIM or keys.shape != part.values.shape:
        return False
    if keys.dtype != (q.dtype if part.scales is None else E4M3):
        return False
    if part.scales is not None and part.table_size != keys.shape[1]:  # they are laid out by blocks
        return False
    tables = part.rows.block_tables
    return q.stride()[1:] == (dim, 1) and keys.is_contiguous() and tables.stride(1) == 1 and ops.takes(q)


def run(part: Part) -> None:
    """A sequence of length 0 gives zeros."""
    (q, out), (scale, window, softcap, sinks) = part.decoding, part.params
    keys, tables = part.keys, part.rows.block_tables
    n, query_len = part.stop, part.rows.query_len
    heads, dim = q.shape[1:]
    size, kv_heads = part.table_size, keys.shape[2]
    queries = query_len * heads // kv_heads  # that read a key head's tokens of one sequence
    partial = q.new_empty(torch.get_num_threads(), 2, queries, 2 + dim, dtype=torch.float32)
    values_ = (q, keys, part.values, tables, part.rows.lengths, out, partial, sinks, part.scales, n, heads, kv_heads,
               dim, size, tables.stride(0), q.stride(0), window, query_len, float(scale),
               float(softcap))  # fmt: skip
    first = "decode" if part.scales is None else "decode_fp8"
    ops.run(*((ops.typed("cpu_decode", name, q.dtype), values_) for name in (first, "merge")))


CANDIDATE = Candidate(
    "cpu_decode.cpp", "CPUs",
    f"decoding rows, heads of up to {MAX_DIM} elements, f32 or bf16, caches of the same or of e4m3",
    supports, run,
)  # fmt: skip
