"""Attention over a paged cache, for any mix of prompts, chunks of prompts and single tokens.

Each backend is a file with the functions of backend.Backend. Here one is chosen for the decoding sequences of a step,
and one for the others.
"""

from __future__ import annotations

import functools

from torch import Tensor

from ...errors import MODEL, FatalError
from ..rope.fp8_cache import E4M3
from ..rope.rope import CosSin, KVCache, QKNorm, rope_and_store_kv
from . import attention_tma, cpu_decode, cudnn, reference
from .backend import AttentionMetadata, AttentionParams, Backend, CurrentKV, Part


@functools.cache
def backends(device_type: str) -> tuple[Backend, ...]:
    """Those of a kind of device: the first that supports a part computes it."""
    if device_type == "cpu":
        return cpu_decode, reference
    from . import attention_triton, mla_decode, mla_triton

    return attention_tma, cudnn, mla_decode, mla_triton, attention_triton


def store_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: CosSin,
    norms: QKNorm | None,
    cache: tuple[Tensor, ...],
    rows: AttentionMetadata,
    params: AttentionParams,
) -> Tensor:
    """rope_and_store_kv and then paged_attention of what it returns. q, k and v may be overwritten.

    A step of decoding sequences alone is one kernel on GPUs, where heads are rotated as a whole and not interleaved.
    """
    if q.is_cuda and supports_one_kernel(q, k, v, cos_sin, cache, rows):
        return decode_current(q, CurrentKV(k, v, cos_sin, norms, rows.slots), cache, rows, params)
    q = rope_and_store_kv(q, k, v, cos_sin, norms, cache, rows.slots)
    keys, values, scales = KVCache(*cache)
    return paged_attention(q, keys, values, rows, params, scales)


def supports_one_kernel(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: CosSin, cache: tuple[Tensor, ...], rows: AttentionMetadata
) -> bool:
    """Whether the decode kernels of GPUs may norm, rotate and write the step's tokens."""
    tokens, _, dim = q.shape
    if not 0 < tokens == rows.num_decodes:
        return False
    side_by_side = all(x.stride()[1:] == (dim, 1) for x in (q, k, v))
    whole = cos_sin.cos.shape[-1] == dim and not cos_sin.interleaved
    return whole and side_by_side and cache[0].dtype in (q.dtype, E4M3)


def decode_current(
    q: Tensor, current_kv: CurrentKV, cache: tuple[Tensor, ...], rows: AttentionMetadata, params: AttentionParams
) -> Tensor:
    """store_and_attend where supports_one_kernel."""
    keys, values, scales = KVCache(*cache)
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
    attend(Part(q, keys, values, rows, params, 0, rows.num_decodes, out, scales, current_kv))
    return out.flatten(1)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: AttentionMetadata, params: AttentionParams,
    scales: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale q k^T) v for every token of the step, causal within its sequence: [T, heads * value_dim], q's
    dtype.

    q: [T, heads, head_dim]. keys, values: [blocks, block_size, kv_heads, head_dim or value_dim], with this step's
    tokens written; scales: of those in e4m3. Query head h reads key head h // (heads / kv_heads) (grouped queries:
    Ainslie et al. 2023, arXiv 2305.13245). Computed in f32. On GPUs a decoding sequence may have length 0, which gives
    zeros: it fills a captured batch up. out: [T, heads, value_dim], contiguous, where the result is to be. Raises
    FatalError where no backend takes these heads.
    """
    out = q.new_empty(len(q), q.shape[1], values.shape[3]) if out is None else out
    n, count = rows.num_decodes, len(rows.query_lens)
    if n:
        attend(Part(q, keys, values, rows, params, 0, n, out, scales))
    if n < count:
        attend(Part(q, keys, values, rows, params, n, count, out, scales))
    return out.flatten(1)


def attend(part: Part) -> None:
    """By the first backend that takes it. Raises FatalError where none does."""
    for backend in backends(part.q.device.type):
        if backend.supports(part):
            backend.run(part, backend.plan(part))
            return
    key_dim, value_dim, kind = part.keys.shape[3], part.values.shape[3], part.q.device.type
    raise FatalError(
        f"no attention kernel for {kind} takes keys of {key_dim} and values of {value_dim} elements a head: "
        "use --device cpu, which computes all",
        MODEL,
    )
