"""Attention to the newest tokens and to compressed entries of all tokens (DeepSeek-V4: DeepSeek-AI 2026, section 2.3).

Keys are the values, and all heads share them. A compressed entry stands for a window of `rate` tokens: each of its
elements is a mean of theirs, weighted by a softmax over the window. A block of the cache has the keys of its tokens
and behind them the entries of the windows that end in it: [blocks, tokens + entries, dim]. So one list of slots has
all that a token attends to. Everything here is torch on all devices and reads lengths on the device; prompts wait for
it once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backend import AttentionMetadata, AttentionParams, Selection

GATHER_BYTES = 1 << 27  # keys and scores in f32 that are kept at once, if one token's take no more


class Compression(NamedTuple):
    """How a layer makes entries."""

    rate: int  # tokens of a window
    dim: int
    overlaps: bool = False  # an entry is made of the window before, too, by values and gates of their own

    @property
    def tokens(self) -> int:
        """Tokens that an entry is made of."""
        return self.rate * (1 + self.overlaps)

    @property
    def width(self) -> int:
        """Values of a token, and gates."""
        return self.dim * (1 + self.overlaps)


def entries_of(block_size: int, rate: int) -> int:
    """Entries that a block has room for. One of the two numbers must divide the other."""
    return max(1, block_size // rate) if rate else 0


def tokens_of_block(size: int, rate: int) -> int:
    """Tokens of a block that has `size` of both."""
    if not rate:
        return size
    return size - 1 if size <= rate else size * rate // (rate + 1)


class Tokens(NamedTuple):
    """Places of a step's tokens: [T] each."""

    sequence: Tensor
    position: Tensor
    first: Tensor  # the index of its sequence's first token in the step
    last: Tensor  # the position of its sequence's last token

    def of(self, index: Tensor | slice) -> Tokens:
        """Some of them."""
        return Tokens(*(x[index] for x in self))


def tokens_of(rows: AttentionMetadata) -> Tokens:
    """Made once a step."""
    found = rows.scratch.get("tokens")
    if found is None:
        starts = rows.query_starts.long()
        count, sequences = sum(rows.query_lens), torch.arange(len(rows.query_lens), device=starts.device)
        of = sequences.repeat_interleave(starts.diff(), output_size=count)
        first, last = starts[of], rows.lengths.long()[of] - 1
        position = last - (starts[of + 1] - 1 - torch.arange(count, device=starts.device))
        found = rows.scratch["tokens"] = Tokens(of, position, first, last)
    return found


class Windows(NamedTuple):
    """Windows that a step's tokens close, or, of sequences that decode, the one that each token lies in."""

    tokens: Tensor  # [N] indices of tokens
    inputs: Tensor  # [N, tokens of an entry, channels] f32
    known: Tensor  # [N, tokens of an entry] bool


def gather_windows(x: Tensor, ring: Tensor, state_rows: Tensor, rows: AttentionMetadata, of: Compression) -> Windows:
    """x: [T, channels] f32, of the step's tokens. ring: [all rows, kept, channels], those of the tokens before, by
    position. state_rows: [B], each sequence's row there. All windows of a step that only decodes are gathered, with
    what is known of them, as which ones end is known on the device alone."""
    tokens = tokens_of(rows)
    if rows.num_decodes == len(rows.query_lens):
        chosen = torch.arange(len(x), device=x.device)
    else:
        chosen = ((tokens.position + 1) % of.rate == 0).nonzero()[:, 0]
    at = tokens.of(chosen)
    ends = (at.position // of.rate + 1) * of.rate
    positions = ends[:, None] + torch.arange(-of.tokens, 0, device=x.device)
    known = (positions >= 0) & (positions <= at.last[:, None])
    here = positions - tokens.position[at.first][:, None]  # of the step's tokens from 0 on
    old = ring[state_rows[at.sequence][:, None], positions % ring.shape[1]]
    new = x[(at.first[:, None] + here).clamp_(0, max(len(x) - 1, 0))]
    return Windows(chosen, torch.where((here < 0)[..., None], old, new), known)


def write_ring(x: Tensor, ring: Tensor, state_rows: Tensor, rows: AttentionMetadata) -> None:
    """Put a sequence's newest inputs into its ring, as gather_windows has them."""
    tokens = tokens_of(rows)
    if rows.num_decodes < len(rows.query_lens):
        newest = tokens.last - tokens.position < ring.shape[1]
        x, tokens = x[newest], tokens.of(newest)
    row = state_rows[tokens.sequence]
    some = real(row)
    ring[row[some], tokens.position[some] % ring.shape[1]] = x[some]


def real(slots: Tensor) -> Tensor:
    """Indices [T], each its own, but 0 where the slot is negative: writes of rows that fill a captured step up repeat
    that of its first row."""
    at = torch.arange(len(slots), device=slots.device)
    return torch.where(slots < 0, 0, at)


def compress(inputs: Tensor, known: Tensor, of: Compression) -> Tensor:
    """Entries [N, dim] f32. inputs: [N, tokens of an entry, 2 * width], values before gates, as Windows has them."""
    values, gates = inputs.masked_fill(~known[..., None], 0).split(of.width, 2)
    if of.overlaps:
        values, gates = (torch.cat((x[:, : of.rate, : of.dim], x[:, of.rate :, of.dim :]), 1) for x in (values, gates))
    return (values * gates.masked_fill(~known[..., None], float("-inf")).softmax(1)).sum(1)


def store(x: Tensor, cache: Tensor, slots: Tensor) -> None:
    """cache.view(-1, dim)[slots] = x, where slots are not negative."""
    some = real(slots)
    cache.view(-1, cache.shape[2])[slots[some]] = x[some].to(cache.dtype)


def attend(
    q: Tensor, cache: Tensor, rows: AttentionMetadata, params: AttentionParams, rate: int, block_size: int,
    selection: Selection | None = None,
) -> Tensor:  # fmt: skip
    """Each token's attention to the `params.window` newest tokens and to the entries of windows that have ended:
    [T, heads, dim].

    q: [T, heads, dim], rotated. cache: with the step's keys and entries stored. rate: of the entries; 0: there are
    none. selection: slots of those that a token reads among entries alone, of blocks without keys; None: it reads all.
    """
    out, tokens = torch.empty_like(q), tokens_of(rows)
    entries = (
        selection.block_tables.shape[1]
        if selection is not None
        else max(rows.kv_lens, default=0) // rate
        if rate
        else 0
    )
    listed = params.window + entries
    together = max(1, GATHER_BYTES // (4 * listed * (cache.shape[2] + 2 * q.shape[1])))
    flat = cache.view(-1, cache.shape[2])
    for first in range(0, len(q), together):
        some = slice(first, first + together)
        chosen = None if selection is None else selection[some]
        of = tokens.of(some), cache.shape[1], rows.block_tables
        slots, seen = _listed(*of, params.window, rate, block_size, entries, chosen)
        keys = flat[slots].float()
        scores = torch.bmm(q[some].float(), keys.mT).mul_(params.scale).masked_fill_(~seen[:, None], float("-inf"))
        if params.sinks is not None:
            sinks = params.sinks.float()[None, :, None].expand(len(scores), -1, 1)
            scores = torch.cat((scores, sinks), 2).softmax(2)[..., :-1]
        else:
            scores = scores.softmax(2)
        out[some] = torch.bmm(scores, keys).to(out.dtype)
    return out


def _listed(
    tokens: Tokens, size: int, tables: Tensor, window: int, rate: int, block_size: int, entries: int,
    selection: Selection | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Slots [t, window + entries] and which of them a token sees; the others are its own, so that nothing that lies
    elsewhere, not even a NaN, reaches it. size: of a block, with its entries."""
    device, position, sequence = tables.device, tokens.position[:, None], tokens.sequence[:, None]
    recent = position - torch.arange(window, device=device)
    seen = recent >= 0
    recent = torch.where(seen, recent, position)
    slots = tables[sequence, recent // block_size].long() * size + recent % block_size
    own, each = slots[:, :1], size - block_size
    if selection is not None:
        found = selection.block_tables.long()
        chosen = torch.arange(entries, device=device) < selection.lengths[:, None]
        further = found // each * size + block_size + found % each
    elif entries:
        numbers = torch.arange(entries, device=device)
        chosen = numbers < (position + 1) // rate
        blocks = torch.where(chosen, ((numbers + 1) * rate - 1) // block_size, 0)
        further = tables[sequence, blocks].long() * size + block_size + numbers % each
    else:
        return slots, seen
    return torch.cat((slots, torch.where(chosen, further, own)), 1), torch.cat((seen, chosen), 1)
