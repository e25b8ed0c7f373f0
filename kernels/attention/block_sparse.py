"""Attention to blocks of tokens that an indexer chooses for each key head (MiniMax-M3, arXiv 2606.13392).

An index query of each key head scores every token before a token; a block of tokens is as good as its best one. The
best blocks are read, and always the newest ones. To attention each token's key head is a sequence that decodes, whose
block table lists tokens, and the cache is one of a single key head: kernels that read a list of tokens need nothing
more. The choice is computed in torch on all devices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rope import fp8_cache
from ..rope.rope import KVCache
from . import indexer
from .attention import attend, paged_attention
from .backend import AttentionMetadata, AttentionParams, Part, Selection

LIST_BYTES = 48  # that a listed token takes while lists are made


class Blocks(NamedTuple):
    """How blocks are chosen."""

    size: int  # tokens of a block
    topk: int  # blocks that a token reads
    local: int  # the newest of them, its own included: at least 1

    @property
    def tokens(self) -> int:
        """How many tokens one reads at most."""
        return self.size * self.topk

    def counts(self, seen: int) -> int:
        """How many tokens one reads that sees so many, itself included: its own block may be a part."""
        return seen if seen <= self.tokens else self.tokens - self.size + (seen - 1) % self.size + 1


def block_sparse_attention(
    q: Tensor, cache: KVCache, index_q: Tensor, index_keys: Tensor, rows: AttentionMetadata, params: AttentionParams,
    blocks: Blocks, rotated: int, index_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """paged_attention of the chosen blocks alone: [T, heads * value_dim].

    q: [T, heads, head_dim]. index_q: [T, kv_heads, dim], rotated. index_keys: [blocks, block_size, dim], with this
    step's keys stored, as the cache has them. rotated, index_scales: as indexer.select has them.
    """
    keys, values, scales = cache
    if max(rows.kv_lens, default=0) <= blocks.tokens:
        return paged_attention(q, keys, values, rows, params, scales)
    heads, widths = index_q.shape[1], keys.shape[3] + values.shape[3]
    out = q.new_empty(*q.shape[:2], values.shape[3])
    seen = list(indexer.tokens_seen(rows))
    gathered = 0 if scales is None else 10 * widths  # codes, numbers in f32 and in q's dtype
    for piece in indexer.pieces(rows, -(-4 * heads // blocks.size), heads * blocks.tokens * (LIST_BYTES + gathered)):
        some = slice(piece.start, piece.stop)
        listed = tokens_of(choose(index_q[some], index_keys, piece, blocks, rotated, index_scales), piece, blocks, keys)
        counts = torch.where(
            piece.seen <= blocks.tokens, piece.seen, (piece.seen - 1) % blocks.size + blocks.tokens - blocks.size + 1
        )
        lengths = [count for n in seen[some] for count in [blocks.counts(n)] * heads]
        if scales is None:
            pair = keys.view(-1, 1, 1, keys.shape[3]), values.view(-1, 1, 1, values.shape[3])
        else:
            pair = _gathered(keys, scales, 0, listed, q.dtype), _gathered(values, scales, 1, listed, q.dtype)
            listed = torch.arange(listed.numel(), dtype=torch.int32, device=q.device).view(listed.shape)
        sequences = Selection(listed, counts.repeat_interleave(heads), lengths)
        queries = q[some].reshape(len(listed), -1, q.shape[2])
        results = out[some].view(*queries.shape[:2], out.shape[2])
        attend(Part(queries, *pair, sequences, params, 0, len(listed), results))
    return out.flatten(1)


def choose(
    q: Tensor, keys: Tensor, piece: indexer.Piece, blocks: Blocks, rotated: int, scales: Tensor | None = None
) -> Tensor:
    """The numbers of the blocks that each of T tokens reads, [T, heads, at most topk] in ascending order; behind them,
    where a token sees fewer, the number of all blocks. q: [T, heads, dim]."""
    (tokens, heads, dim), size, tables = q.shape, keys.shape[1], piece.tables.long()
    count, sequences = -(-piece.longest // blocks.size), len(tables)
    queries = q.float().reshape(sequences, -1, dim)
    seen = piece.seen.view(sequences, -1, 1, 1)
    best = torch.empty(sequences, queries.shape[1], count, device=q.device)
    together = max(1, indexer.SCORES_BYTES // (4 * sequences * (queries.shape[1] + 2 * dim) * blocks.size))
    for first in range(0, count, together):
        last = min(count, first + together)
        positions = torch.arange(first * blocks.size, last * blocks.size, device=q.device)
        at = tables[:, (positions // size).clamp_(max=tables.shape[1] - 1)] * size + positions % size
        if scales is None:
            read = keys.view(-1, dim).index_select(0, at.flatten()).float()
        else:
            read = fp8_cache.gather_latents(keys, scales, at.flatten(), rotated, torch.float32)
        scores = torch.bmm(queries, read.view(sequences, -1, dim).mT).view(sequences, -1, heads, len(positions))
        scores.masked_fill_(positions >= seen, float("-inf"))  # whatever lies in slots that nothing was written to
        best[..., first:last] = scores.view(*best.shape[:2], last - first, blocks.size).amax(-1)
    best = best.view(tokens, heads, count)
    own = (piece.seen.long() - 1).clamp_(min=0) // blocks.size
    local = (own[:, None] - torch.arange(blocks.local, device=q.device)).clamp_(min=0)
    best.scatter_(2, local[:, None].expand(-1, heads, -1), float("inf"))
    values, indices = best.topk(min(blocks.topk, count), sorted=False)
    return indices.masked_fill_(values == float("-inf"), count).sort(-1).values


def tokens_of(chosen: Tensor, piece: indexer.Piece, blocks: Blocks, keys: Tensor) -> Tensor:
    """Slots of what each token's key heads read in a cache like keys [blocks, block_size, kv_heads, head_dim], as heads
    of tokens: [T * kv_heads, most] int32. Behind what a token sees stands its last token."""
    (tokens, heads, _), (size, device) = chosen.shape, (keys.shape[1], chosen.device)
    positions = (chosen[..., None] * blocks.size + torch.arange(blocks.size, device=device)).flatten(2)
    positions = torch.minimum(positions, piece.seen.long()[:, None, None] - 1).clamp_(min=0)
    sequence = torch.arange(tokens, device=device)[:, None, None] // piece.query_len
    slots = piece.tables[sequence, positions // size].long().mul_(size).add_(positions % size)
    return slots.mul_(heads).add_(torch.arange(heads, device=device)[:, None]).flatten(0, 1).int()


def _gathered(codes: Tensor, scales: Tensor, part: int, listed: Tensor, dtype: torch.dtype) -> Tensor:
    """Listed heads of tokens of a cache in e4m3 as numbers, one behind the other: [listed, 1, 1, dim]. part: 0 of keys,
    1 of values."""
    heads, size, at = codes.shape[2], codes.shape[1], listed.flatten().long()
    read = codes.view(torch.uint8).view(-1, codes.shape[3]).index_select(0, at).view(fp8_cache.E4M3)
    slots = at // heads
    exponents = scales[slots // size, at % heads, part, slots % size]
    return fp8_cache.dequantize(read, exponents, dtype)[:, None, None]
