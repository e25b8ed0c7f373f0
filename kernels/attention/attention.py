"""Attention over a paged cache, for any mix of prompts, chunks of prompts and single tokens.

One candidate is chosen for the decoding sequences of a step, and one for the others.
"""

from __future__ import annotations

from torch import Tensor

from ...errors import MODEL, FatalError
from ..candidate import choose, imported_late
from ..rope.fp8_cache import E4M3
from ..rope.rope import CurrentKV, KVCache, rope_and_store_kv
from . import cpu_decode, cudnn, decode, mla_decode, prefill, reference
from .backend import AttentionMetadata, AttentionParams, Part

# Candidates by kind of device: the first that supports a part computes it.
CANDIDATES = {
    "cuda": (
        decode.CANDIDATE,
        prefill.CANDIDATE,
        cudnn.CANDIDATE,
        mla_decode.CANDIDATE,
        imported_late(f"{__package__}.mla_triton", "GPUs", "latents, all else"),
        imported_late(f"{__package__}.attention_triton", "GPUs", "values as wide as keys, all else"),
    ),
    "cpu": (cpu_decode.CANDIDATE, reference.CANDIDATE),
}


def store_and_attend(
    q: Tensor, new: CurrentKV, cache: tuple[Tensor, ...], rows: AttentionMetadata, params: AttentionParams
) -> Tensor:
    """rope_and_store_kv and then paged_attention of what it returns. q, and new keys and values, may be overwritten.

    A step of decoding sequences of one token alone is one kernel on GPUs, where heads are rotated as a whole and not
    interleaved.
    """
    if q.is_cuda and supports_one_kernel(q, new, cache, rows):
        return decode_current(q, new, cache, rows, params)
    q = rope_and_store_kv(q, new, cache)
    keys, values, scales = KVCache(*cache)
    return paged_attention(q, keys, values, rows, params, scales)


def supports_one_kernel(q: Tensor, new: CurrentKV, cache: tuple[Tensor, ...], rows: AttentionMetadata) -> bool:
    """Whether the decode kernels of GPUs may norm, rotate and write the step's tokens."""
    tokens, _, dim = q.shape
    if not 0 < tokens == rows.num_decodes:
        return False
    side_by_side = all(x.stride()[1:] == (dim, 1) for x in (q, new.k, new.v))
    whole = new.cos_sin.cos.shape[-1] == dim and not new.cos_sin.interleaved
    return whole and side_by_side and cache[0].dtype in (q.dtype, E4M3)


def decode_current(
    q: Tensor, new: CurrentKV, cache: tuple[Tensor, ...], rows: AttentionMetadata, params: AttentionParams
) -> Tensor:
    """store_and_attend where supports_one_kernel."""
    keys, values, scales = KVCache(*cache)
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
    attend(Part(q, keys, values, rows, params, 0, rows.num_decodes, out, scales, new))
    return out.flatten(1)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: AttentionMetadata, params: AttentionParams,
    scales: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale q k^T) v for every token of the step, causal within its sequence, or up to rows.reach: [T, heads *
    value_dim], q's dtype.

    q: [T, heads, head_dim]. keys, values: [blocks, block_size, kv_heads, head_dim or value_dim], with this step's
    tokens written; scales: of those in e4m3. Query head h reads key head h // (heads / kv_heads) (grouped queries:
    Ainslie et al. 2023, arXiv 2305.13245). Computed in f32. On GPUs a decoding sequence may have length 0, which gives
    zeros: it fills a captured batch up. out: [T, heads, value_dim], contiguous, where the result is to be. Raises
    FatalError where no candidate takes these heads.
    """
    out = q.new_empty(len(q), q.shape[1], values.shape[3]) if out is None else out
    n, count = rows.num_decodes, len(rows.query_lens)
    if n:
        attend(Part(q, keys, values, rows, params, 0, n, out, scales))
    if n < count:
        attend(Part(q, keys, values, rows, params, n, count, out, scales))
    return out.flatten(1)


def attend(part: Part) -> None:
    """Computes the part by the first candidate that takes it. Raises FatalError where none does."""
    kind = part.q.device.type
    if found := choose(CANDIDATES["cpu" if kind in ("cpu", "mps") else "cuda"], part):
        found.run(part)
        return
    key_dim, value_dim = part.keys.shape[3], part.values.shape[3]
    raise FatalError(
        f"no attention kernel for {kind} takes keys of {key_dim} and values of {value_dim} elements a head: "
        "use --device cpu, which computes all",
        MODEL,
    )
