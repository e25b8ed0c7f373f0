"""Multi-head latent attention over a paged cache of latents (DeepSeek-V2: arXiv 2405.04434, section 2.1).

The cache keeps, for all heads, one latent a token and one key with the token's position: [blocks, block_size, latent +
rope]. A head's keys and values are linear in the latent, so there are two ways to attend:

- absorbed: queries are multiplied with the keys' weights, and attend to the latents as to one key head, whose first
  part is the value, too; what comes out is multiplied with the values' weights. Nothing is expanded.
- expanded: the context's latents are multiplied with both first. A query and a key then take a third of the
  multiply-adds, in DeepSeek's sizes. This way is for many tokens of a sequence at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..device import upload
from ..norm.norm import rms_norm
from ..rope import fp8_cache
from ..rope.rope import CosSin, apply_rotary
from . import reference
from .attention import attend
from .backend import AttentionMetadata, AttentionParams, Part, Selection

EXPANDED_BYTES = 1 << 28  # keys and values that are expanded at once: of as many heads as it holds
CONTEXT = 1 << 16  # tokens whose latents are expanded at once, unless a sequence alone has more
# Absorbed tokens of a step with prompts up to which Triton multiplies with weights on GPUs, as it does with any number
# where all sequences decode: cuBLAS has a kernel for nearly every number of rows, loads each on its first use and waits
# for the whole GPU then. More were not timed.
TRITON_TOKENS = 512


class LatentNorm(NamedTuple):
    """The norm of a latent, before it is stored."""

    weight: Tensor  # [latent]
    eps: float


def rope_and_store_latents(
    q: Tensor, latents: Tensor, norm: LatentNorm, cos_sin: CosSin, cache: Tensor, slots: Tensor,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """The last part of queries is rotated in place; the step's latents are normed, rotated and stored.

    q: [T, heads, nope + rope], heads side by side. latents: [T, latent + rope]; its first part is normed, the other
    rotated. Both may be overwritten. cache: [blocks, block_size, latent + rope]. slots: [T] int64, none twice; tokens
    with a negative one are not written on GPUs. scales: of a cache in e4m3 [blocks, 1, 2, block_size], of the latent
    and of the rotated key (rope/fp8_cache.py).
    """
    if q.is_cuda:
        from . import mla_store_triton

        return mla_store_triton.rope_and_store_latents(q, latents, norm, cos_sin, cache, slots, scales)
    rope_and_store_latents_reference(q, latents, norm, cos_sin, cache, slots, scales)


def rope_and_store_latents_reference(
    q: Tensor, latents: Tensor, norm: LatentNorm, cos_sin: CosSin, cache: Tensor, slots: Tensor,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    rope, latent = cos_sin.cos.shape[-1], len(norm.weight)
    q[..., -rope:] = apply_rotary(q[..., -rope:], cos_sin)
    key = apply_rotary(latents[:, None, latent:], cos_sin)[:, 0]
    kept = torch.cat((rms_norm(latents[:, :latent], norm.weight, norm.eps), key), 1)
    if scales is not None:
        return fp8_cache.store_latents(kept, cache, scales, latent, slots)
    cache.view(-1, cache.shape[2]).index_copy_(0, slots, kept.to(cache.dtype))


def store_and_attend(
    q: Tensor, latents: Tensor, norm: LatentNorm, cos_sin: CosSin, cache: Tensor, up: Tensor, rows: AttentionMetadata,
    params: AttentionParams, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rope_and_store_latents and then latent_attention of the same tokens; rows give their slots. Decoding sequences
    alone take fewer kernels on GPUs."""
    if len(q) == 0:
        return q.new_empty(0, q.shape[1] * (up.shape[1] - q.shape[2] + cache.shape[2] - up.shape[2]))
    if not q.is_cuda or len(q) != rows.num_decodes:  # as with several tokens of a sequence
        rope_and_store_latents(q, latents, norm, cos_sin, cache, rows.slots, scales)
        return latent_attention(q, cache, up, rows, params, scales)
    from . import mla_store_triton, mla_triton

    (tokens, heads, _), latent = q.shape, up.shape[2]
    queries, mixed = q.new_empty(tokens, heads, cache.shape[2]), q.new_empty(tokens, heads, latent)
    mla_store_triton.absorb_and_store_latents(q, latents, norm, cos_sin, cache, rows.slots, up, queries, scales)
    keys = cache[:, :, None]
    attend(Part(queries, keys, keys[..., :latent], rows, params, 0, tokens, mixed, scales))
    return mla_triton.values(mixed, up, q.shape[2] - (cache.shape[2] - latent)).flatten(1)


def latent_attention(
    q: Tensor, cache: Tensor, up: Tensor, rows: AttentionMetadata, params: AttentionParams,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale q k^T) v for every token of the step, causal within its sequence: [T, heads * value], q's dtype.

    q: [T, heads, nope + rope], rotated. cache: with this step's tokens stored. up: [heads, nope + value, latent], by
    which a latent becomes a head's key without a position, and its value. scales: as rope_and_store_latents has them.
    Scores and sums are computed in f32.
    """
    n, latent = rows.num_decodes, up.shape[2]
    nope = q.shape[2] - (cache.shape[2] - latent)
    out = q.new_empty(*q.shape[:2], up.shape[1] - nope)
    expanded = n < len(rows.query_lens) and expands(rows, cache.shape[2] - nope - latent, up)
    absorbed = n * rows.query_len if expanded else len(q)
    if absorbed:
        stops = [n] if expanded else [n, len(rows.query_lens)]
        attend_absorbed(q[:absorbed], cache, up, rows, params, stops, out[:absorbed], scales)
    if expanded:
        for context in contexts(rows, cache.shape[1]):
            attend_expanded(q, cache, up, context, params, out, scales)
    return out.flatten(1)


def sparse_latent_attention(
    q: Tensor, cache: Tensor, up: Tensor, selection: Selection, params: AttentionParams, scales: Tensor | None = None
) -> Tensor:
    """latent_attention of the selected tokens alone, absorbed; of so many tokens at once that what it makes of them
    takes EXPANDED_BYTES."""
    (tokens, heads, width), (each, latent) = q.shape, up.shape[1:]
    out = q.new_empty(tokens, heads, each - (width - (cache.shape[2] - latent)))
    together = max(1, EXPANDED_BYTES // (heads * (cache.shape[2] + latent) * q.element_size()))
    for first in range(0, tokens, together):
        some = slice(first, first + together)
        rows = selection if tokens <= together else selection[some]
        attend_absorbed(q[some], cache, up, rows, params, [rows.num_decodes], out[some], scales)
    return out.flatten(1)


def expands(rows: AttentionMetadata, rope: int, up: Tensor) -> bool:
    """Whether the step's prompts take fewer multiply-adds, of each head, with expanded keys and values."""
    heads_size, latent = up.shape[1:]
    lens = list(zip(rows.query_lens, rows.kv_lens, strict=True))[rows.num_decodes :]
    tokens, context = (sum(column) for column in zip(*lens, strict=True))
    pairs = sum(count * (length - count / 2) for count, length in lens)
    widened = heads_size * latent  # a token's, of queries and outputs or of keys and values
    return pairs * (heads_size + rope) + context * widened < pairs * (2 * latent + rope) + tokens * widened


def attend_absorbed(
    q: Tensor, cache: Tensor, up: Tensor, rows: AttentionMetadata, params: AttentionParams, stops: list[int],
    out: Tensor, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Write all rows of out [T, heads, value]; q [T, heads, nope + rope] is of the sequences up to stops[0], which
    decode, and of those up to stops[1], if there is that."""
    (tokens, heads, width), latent = q.shape, up.shape[2]
    nope, few = width - (cache.shape[2] - latent), q.is_cuda and tokens <= TRITON_TOKENS
    queries = q.new_empty(tokens, heads, cache.shape[2])
    if few:
        from . import mla_store_triton, mla_triton

        mla_store_triton.absorb_rotated(q, up, queries)
    else:
        torch.bmm(q[..., :nope].transpose(0, 1), up[:, :nope], out=queries[..., :latent].transpose(0, 1))
        queries[..., latent:] = q[..., nope:]
    keys = cache[:, :, None]
    mixed = q.new_empty(tokens, heads, latent)
    first = 0
    for stop in stops:
        if first < stop:
            attend(Part(queries, keys, keys[..., :latent], rows, params, first, stop, mixed, scales))
        first = stop
    if few:
        mla_triton.values(mixed, up, nope, out)
    else:
        torch.bmm(mixed.transpose(0, 1), up[:, nope:].transpose(1, 2), out=out.transpose(0, 1))


class Context(NamedTuple):
    """Neighbouring sequences of a step that do not decode, and where the cache has their tokens."""

    first: int  # row of q
    query_lens: list[int]
    kv_lens: list[int]
    slots: Tensor  # [all tokens of these sequences] int64
    query_starts: Tensor  # [sequences + 1] int32: rows of q
    kv_starts: Tensor  # [sequences + 1] int32: indices into slots


def contexts(rows: AttentionMetadata, block_size: int) -> list[Context]:
    """Contexts of a step's sequences that do not decode; made once a step."""
    found = rows.scratch.get("mla contexts")
    if found is None:
        found = rows.scratch["mla contexts"] = list(_make_contexts(rows, block_size))
    return found


def _make_contexts(rows: AttentionMetadata, block_size: int) -> Iterator[Context]:
    start, stop, count = rows.num_decodes, rows.num_decodes, len(rows.kv_lens)
    row = rows.num_decodes * rows.query_len
    while start < count:
        total = 0
        while stop < count and (stop == start or total + rows.kv_lens[stop] <= CONTEXT):
            total += rows.kv_lens[stop]
            stop += 1
        query_lens, kv_lens = rows.query_lens[start:stop], rows.kv_lens[start:stop]
        slots = torch.cat([reference.slots_of(rows, i, block_size) for i in range(start, stop)])
        kv_starts = upload(np.cumsum([0, *kv_lens], dtype=np.int32), slots.device)
        yield Context(row, query_lens, kv_lens, slots, rows.query_starts[start : stop + 1], kv_starts)
        row += sum(query_lens)
        start = stop


def attend_expanded(
    q: Tensor, cache: Tensor, up: Tensor, context: Context, params: AttentionParams, out: Tensor,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Write these sequences' rows of out [T, heads, value]; q [T, heads, nope + rope]."""
    heads, each, latent = up.shape
    if scales is None:
        latents = cache.view(-1, cache.shape[2]).index_select(0, context.slots)
    else:
        latents = fp8_cache.gather_latents(cache, scales, context.slots, latent, q.dtype)
    together = max(1, EXPANDED_BYTES // (len(latents) * each * q.element_size()))
    for first in range(0, heads, together):
        some = slice(first, first + together)
        kv = torch.mm(latents[:, :latent], up[some].flatten(0, 1).t()).view(len(latents), -1, each)
        chosen: tuple[Any, ...] = q[:, some], kv, latents[:, latent:], context, params, out[:, some]
        if q.is_cuda:
            from . import mla_triton

            mla_triton.prefill_expanded(*chosen)
        else:
            expanded_reference(*chosen)


def expanded_reference(
    q: Tensor, kv: Tensor, rotated: Tensor, context: Context, params: AttentionParams, out: Tensor
) -> None:
    """Write these sequences' rows of out [T, heads, value]; q [T, heads, nope + rope].

    kv [context, heads, nope + value] and rotated [context, rope] are of all sequences, one after the other.
    """
    nope = kv.shape[2] - out.shape[2]
    row, start = context.first, 0
    for count, length in zip(context.query_lens, context.kv_lens, strict=True):
        seen, tokens = slice(start, start + length), slice(row, row + count)
        shared = rotated[seen, None].expand(-1, kv.shape[1], -1)
        keys = torch.cat((kv[seen, :, :nope], shared), 2).float()
        reference.attend_prompt(q[tokens], keys, kv[seen, :, nope:].float(), params, out[tokens])
        row, start = row + count, start + length
