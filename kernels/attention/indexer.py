"""The lightning indexer (DeepSeek-V3.2-Exp: DeepSeek-AI 2025, section 2.1) over a paged cache of its keys.

A few small heads score every token before a token by the sum of weighted relu(q k); the best are those that attention
reads. Keys are cached in the model's dtype, or in e4m3 as latents are, whose two parts are the rotated part and the
rest here (rope/fp8_cache.py). DeepSeek's own code rotates queries and keys by a Hadamard matrix before it makes e4m3
of them, which leaves their dot products as they are; e4m3 with a scale for each token needs no such spreading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import jit
from ..norm.norm import layer_norm, rms_norm
from ..rope import fp8_cache
from ..rope.rope import CosSin, apply_rotary
from .backend import AttentionMetadata, Selection
from .compressed import tokens_of

SCORES_BYTES = 1 << 27  # scores that are kept at once; on CPUs of each head


class IndexNorm(NamedTuple):
    """The norm of an index key, before it is rotated: a layer norm, or without a bias an RMS norm."""

    weight: Tensor  # [dim]
    bias: Tensor | None
    eps: float


def rope_and_store_index(
    q: Tensor, k: Tensor, norm: IndexNorm, cos_sin: CosSin, cache: Tensor, slots: Tensor, scales: Tensor | None = None
) -> Tensor:
    """The queries, whose first elements are rotated; the step's keys are normed, rotated and stored.

    q: [T, heads, dim], heads side by side. k: [T, dim]. Both may be overwritten. cache: [blocks, block_size, dim].
    slots: [T] int64, none twice; tokens with a negative one are not written on GPUs. scales: of a cache in e4m3
    [blocks, 1, 2, block_size], of the rotated part and of the rest.
    """
    if q.is_cuda:
        from . import indexer_triton

        return indexer_triton.rope_and_store_index(q, k, norm, cos_sin, cache, slots, scales)
    return rope_and_store_index_reference(q, k, norm, cos_sin, cache, slots, scales)


def rope_and_store_index_reference(
    q: Tensor, k: Tensor, norm: IndexNorm, cos_sin: CosSin, cache: Tensor, slots: Tensor, scales: Tensor | None = None
) -> Tensor:
    if norm.bias is None:
        k = rms_norm(k.contiguous(), norm.weight, norm.eps)
    else:
        k = layer_norm(k.contiguous(), norm.weight, norm.bias, norm.eps)
    kept = apply_rotary(k[:, None], cos_sin)[:, 0]
    if scales is not None:
        fp8_cache.store_latents(kept, cache, scales, cos_sin.cos.shape[-1], slots)
    else:
        cache.view(-1, cache.shape[2]).index_copy_(0, slots, kept.to(cache.dtype))
    return apply_rotary(q, cos_sin)


class Piece(NamedTuple):
    """Tokens of a step that are scored at once: of several sequences, each with as many."""

    start: int  # among the step's tokens
    stop: int
    tables: Tensor  # [sequences, max blocks] int32
    query_len: int  # tokens of each sequence
    seen: Tensor  # [stop - start] int32: how many tokens each one sees, itself included
    longest: int  # at most that many


def select(
    q: Tensor, weights: Tensor, cache: Tensor, rows: AttentionMetadata, topk: int, rotated: int,
    scales: Tensor | None = None, stride: int = 1,
) -> Selection | None:  # fmt: skip
    """The topk tokens before each of the step's tokens, itself included, with the largest sums over heads of weight *
    relu(q k); equal ones in the order of positions. None: all, as no sequence has more.

    q: [T, heads, dim], rotated. weights: [T, heads]. cache: with this step's keys stored. rotated: elements of a key
    that are. scales: as rope_and_store_index has them. stride: tokens of a key, where the cache has one for each window
    of so many; a token sees those of windows that have ended. It launches the same kernels whatever `lengths` has.
    """
    longest = max(rows.kv_lens, default=0) // stride
    if longest <= topk:
        return None
    slots = torch.empty(len(q), topk, dtype=torch.int32, device=q.device)
    counts = torch.empty(len(q), dtype=torch.int32, device=q.device)
    for piece in pieces(rows, 4 if q.is_cuda else 4 * q.shape[1], stride=stride):
        tokens = slice(piece.start, piece.stop)
        given = q[tokens], weights[tokens], cache, piece, rotated, slots[tokens], counts[tokens], scales
        if q.is_cuda:
            from . import indexer_triton

            indexer_triton.choose(*given)
        else:
            choose_reference(*given)
    if q.is_cuda:
        jit.written(q.device, slots, counts)
    return Selection(slots, counts, [min(seen // stride, topk) for seen in tokens_seen(rows)])


def tokens_of_pools(pools: Selection, rows: AttentionMetadata, pool: int, block_size: int) -> Selection:
    """The tokens of chosen pools, and behind them those of each token's own pool, itself included, if that has not
    ended. pools: as `select` chose them with this stride, of blocks that have whole pools."""
    at, tokens = pools.block_tables, tokens_of(rows)
    places = torch.arange((at.shape[1] + 1) * pool - 1, dtype=torch.int32, device=at.device)
    seen, chosen = tokens.position.int() + 1, pools.lengths * pool
    block = rows.block_tables[tokens.sequence, (seen - 1).div(block_size, rounding_mode="floor")]
    begun = seen // pool * pool
    own = block * block_size + begun % block_size - chosen  # of its first token, once the place is added
    listed = (at[:, :, None] * pool + places[:pool]).flatten(1)
    slots = torch.where(places < chosen[:, None], F.pad(listed, (0, pool - 1)), own[:, None] + places)
    most = pool * at.shape[1]
    # On GPUs kv_lens may be bounds, and these must be bounds then: a longer sequence may have fewer tokens here.
    rest = [pool - 1 if at.is_cuda else n % pool for n in range(pool)]
    lengths = [n if n < most + pool else most + rest[n % pool] for n in tokens_seen(rows)]
    return Selection(slots, chosen + seen - begun, lengths)


def tokens_seen(rows: AttentionMetadata) -> Iterator[int]:
    """How many tokens each of the step's tokens sees, itself included."""
    for count, length in zip(rows.query_lens, rows.kv_lens, strict=True):
        yield from range(length - count + 1, length + 1)


def pieces(rows: AttentionMetadata, pair_bytes: int, token_bytes: int = 0, stride: int = 1) -> list[Piece]:
    """Pieces that take SCORES_BYTES, if one token does, of so many bytes for a token and one that it sees, and for each
    token; made once a step. stride: as `select` has it."""
    found = rows.scratch.get("indexer")
    if found is None:
        found = rows.scratch["indexer"] = list(_make_pieces(rows, pair_bytes, token_bytes, stride))
    return found


def _make_pieces(rows: AttentionMetadata, pair_bytes: int, token_bytes: int, stride: int) -> Iterator[Piece]:
    n, query_len, device = rows.num_decodes, rows.query_len, rows.lengths.device
    if n:
        longest, lengths = max(rows.kv_lens[:n]), rows.lengths[:n]
        if query_len > 1:
            behind = torch.arange(query_len - 1, -1, -1, dtype=torch.int32, device=device)
            lengths = (lengths[:, None] - behind).clamp_(min=0).flatten()
        if stride > 1:
            lengths, longest = lengths // stride, longest // stride
        together = max(1, SCORES_BYTES // max(1, (pair_bytes * longest + token_bytes) * query_len))
        for first in range(0, n, together):
            last = min(n, first + together)
            start, stop = first * query_len, last * query_len
            yield Piece(start, stop, rows.block_tables[first:last], query_len, lengths[start:stop], longest)
    row = n * query_len
    for i in range(n, len(rows.query_lens)):
        count, length = rows.query_lens[i], rows.kv_lens[i]
        together = max(1, SCORES_BYTES // (pair_bytes * length + token_bytes))
        for start in range(0, count, together):
            stop = min(count, start + together)
            seen = torch.arange(length - count + start + 1, length - count + stop + 1, dtype=torch.int32, device=device)
            tables, longest = rows.block_tables[i : i + 1], (length - count + stop) // stride
            yield Piece(row + start, row + stop, tables, stop - start, seen // stride, longest)
        row += count


def choose_reference(
    q: Tensor, weights: Tensor, cache: Tensor, piece: Piece, rotated: int, slots: Tensor, counts: Tensor,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Write slots [T, topk] and counts [T] of T tokens."""
    topk, size = slots.shape[1], cache.shape[1]
    torch.clamp(piece.seen, max=topk, out=counts)
    for i, table in enumerate(piece.tables):
        tokens = slice(i * piece.query_len, (i + 1) * piece.query_len)
        seen = piece.seen[tokens, None]
        positions = torch.arange(int(seen.max()), device=q.device)
        at = table.long()[positions // size] * size + positions % size
        if len(at) <= topk:
            slots[tokens, : len(at)] = at.int()
            continue
        if scales is None:
            keys = cache.view(-1, cache.shape[2]).index_select(0, at).float()
        else:
            keys = fp8_cache.gather_latents(cache, scales, at, rotated, torch.float32)
        each = torch.mm(q[tokens].float().flatten(0, 1), keys.t()).relu_().view(piece.query_len, -1, len(at))
        sums = torch.bmm(weights[tokens, None].float(), each)[:, 0]
        slots[tokens] = at.int()[best_positions(sums, seen, topk)]


def best_positions(scores: Tensor, seen: Tensor, topk: int) -> Tensor:
    """The topk positions with the largest of scores [T, more than topk] f32 among the first seen [T, 1] of each, in
    ascending order; of equal ones the first. What a token does not see counts as the smallest."""
    unseen = torch.arange(scores.shape[1], device=scores.device) >= seen
    scores = scores.nan_to_num().masked_fill_(unseen, float("-inf"))
    least = scores.topk(topk, sorted=True).values[:, -1:]
    above, level = scores > least, scores == least
    lacking = topk - above.sum(1, keepdim=True)
    chosen = above | (level & (level.cumsum(1) <= lacking))
    return chosen.nonzero()[:, 1].view(-1, topk)
