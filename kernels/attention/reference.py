"""Attention over a paged cache in torch. It computes what no kernel takes, on CPUs also steps with prompts.

It gathers keys token by token, not block by block: a padded position reads its sequence's own last token instead of a
stranger's block, so nothing that lies in unused slots, not even a NaN, can reach a result, and no pass over the
gathered keys is needed to clear them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..candidate import Candidate
from ..rope import fp8_cache
from .backend import AttentionMetadata, AttentionParams, Part

# Keys gathered at once: they and their values should still lie in a core's cache when the scores are computed.
GATHER_BYTES = 1 << 20
# A group of decoding sequences is padded to its longest by at most this share of its tokens, plus SLACK tokens,
# which cost less than the calls of one more group.
PADDING = 0.25
SLACK = 256
# Query rows of a prompt per call: the causal mask is [QUERY CHUNK, keys], and keys after these are not touched.
QUERY_CHUNK = 256


def paged_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, rows: AttentionMetadata, params: AttentionParams,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """paged_attention of attention.py."""
    out = q.new_empty(*q.shape[:2], values.shape[3])
    n, count = rows.num_decodes, len(rows.query_lens)
    for first, stop in ((0, n), (n, count)):
        if first < stop:
            part = Part(q, keys, values, rows, params, first, stop, out, scales)
            run(part)
    return out.flatten(1)


@dataclass(slots=True)
class _Group:
    """Rows that are computed together: the decoding sequences' tokens start:stop in the plan's order, or one sequence
    with T-rows start:stop."""

    start: int
    stop: int
    slots: Tensor  # [n * L]
    mask: Tensor | None = None  # [n, 1, 1, L] f32; None: all of equal length


@dataclass(slots=True)
class _Plan:
    order: Tensor | None  # [D]: decoding sequences' tokens in the groups' order; None: as they are
    groups: list[_Group]
    # Memory into which keys and values are gathered, [most slots, kv_heads, dim] each: one allocation for all
    # groups of all layers stays in the core's cache, and costs its page faults once.
    rooms: tuple[Tensor, Tensor]

    def gather(self, part: Part, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, kv_heads, dim] in f32, valid until the next call."""
        if part.scales is not None:
            return _dequantized(part, part.scales, slots)
        k, v = (
            torch.index_select(cache.view(-1, *cache.shape[2:]), 0, slots, out=room[: len(slots)])
            for cache, room in zip((part.keys, part.values), self.rooms, strict=True)
        )
        return k.float(), v.float()


def _dequantized(part: Part, scales: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = part.keys, part.values
    if keys.data_ptr() != values.data_ptr():
        return fp8_cache.gather(keys, scales, 0, slots), fp8_cache.gather(values, scales, 1, slots)
    k = fp8_cache.gather_latents(keys[:, :, 0], scales, slots, values.shape[3], torch.float32)[:, None]
    return k, k[..., : values.shape[3]]


def supports(part: Part) -> bool:
    return part.current_kv is None


def plan(part: Part) -> _Plan:
    key = "reference", part.first, part.params.window, part.keys.shape, part.values.shape
    found = part.rows.scratch.get(key)
    if found is None:
        order, groups = _decode_groups(part) if part.decodes else (None, _prompts(part))
        most = max((len(group.slots) for group in groups), default=0)
        caches = part.keys, part.values
        most = most if part.scales is None else 0
        k, v = (cache.new_empty(most, *cache.shape[2:]) for cache in caches)
        found = part.rows.scratch[key] = _Plan(order, groups, (k, v))
    return found


def run(part: Part) -> None:
    made = plan(part)
    if not part.decodes:
        for one in made.groups:
            k, v = made.gather(part, one.slots)
            reach = None if part.reach is None else part.reach[one.start : one.stop]
            attend_prompt(part.q[one.start : one.stop], k, v, part.params, part.out[one.start : one.stop], reach)
        return
    n = part.stop * part.rows.query_len
    rows_q = part.q[:n] if made.order is None else part.q.index_select(0, made.order)
    done = []
    for group in made.groups:
        k, v = made.gather(part, group.slots)
        done.append(_decode(rows_q[group.start : group.stop], k, v, group.mask, part.params))
    if made.order is not None:
        part.out.index_copy_(0, made.order, torch.cat(done))
    elif done:
        torch.cat(done, out=part.out[:n])


def _decode_groups(part: Part) -> tuple[Tensor | None, list[_Group]]:
    rows, keys, window = part.rows, part.keys, part.params.window
    block_size, device = part.table_size, keys.device
    row_bytes = keys.shape[2] * keys.shape[3] * 4  # gathered keys are f32
    q = rows.query_len
    ends = [length - after for length in rows.kv_lens[: part.stop] for after in range(q - 1, -1, -1)]
    lens = [min(n, window) if window else n for n in ends]
    order = sorted(range(len(lens)), key=lens.__getitem__)
    identity = order == list(range(len(lens)))
    order_tensor = torch.tensor(order, dtype=torch.int64, device=device)
    groups = []
    for start, stop in _split([lens[i] for i in order], row_bytes):
        longest = lens[order[stop - 1]]
        members = order_tensor[start:stop]
        sequences = members // q
        length = (rows.lengths.index_select(0, sequences) - (q - 1 - members % q))[:, None].long()  # [n, 1]
        span = length.clamp(max=longest)
        at = torch.arange(longest, device=device)
        positions = torch.minimum(length - span + at, length - 1)  # [n, L]
        blocks = rows.block_tables.index_select(0, sequences).long().gather(1, positions // block_size)
        mask = None
        if lens[order[start]] < longest:
            mask = torch.zeros(positions.shape, device=device).masked_fill_(at >= span, float("-inf"))[:, None, None]
        groups.append(_Group(start, stop, (blocks * block_size + positions % block_size).flatten(), mask))
    return (None if identity else order_tensor), groups


def _prompts(part: Part) -> list[_Group]:
    rows, prompts = part.rows, []
    start = rows.num_decodes * rows.query_len
    for i in range(part.first, part.stop):
        stop = start + rows.query_lens[i]
        prompts.append(_Group(start, stop, slots_of(rows, i, part.keys.shape[1])))
        start = stop
    return prompts


def slots_of(rows: AttentionMetadata, i: int, block_size: int) -> Tensor:
    """[length] int64: where the cache has the tokens of the i-th sequence."""
    positions = torch.arange(rows.kv_lens[i], device=rows.block_tables.device)
    return rows.block_tables[i].long()[positions // block_size] * block_size + positions % block_size


def _split(lens: list[int], row_bytes: int) -> list[tuple[int, int]]:
    """Ranges of ascending lengths that are computed together."""
    ranges = []
    start, total = 0, 0
    for i, length in enumerate(lens):
        padded = (i - start + 1) * length
        waste = padded - total - length
        if i > start and (padded * row_bytes > GATHER_BYTES or waste > PADDING * padded + SLACK):
            ranges.append((start, i))
            start, total = i, 0
        total += length
    if lens:
        ranges.append((start, len(lens)))
    return ranges


def _decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """One token each of n sequences: q [n, heads, dim]; k, v [n * L, kv_heads, dim]. Returns [n, heads, value_dim]."""
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    # The query heads that share a key head stand as rows of one small matrix; keys are not repeated.
    grouped = q.reshape(n, kv_heads, heads // kv_heads, dim).float()
    k, v = (c.view(n, -1, kv_heads, c.shape[2]).transpose(1, 2) for c in (k, v))
    if params.softcap or params.sinks is not None:
        sinks = None if params.sinks is None else params.sinks.view(kv_heads, -1, 1)
        out = _softmax(grouped, k, v, mask, params, sinks)
    else:
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=params.scale)
    return out.reshape(n, heads, v.shape[3]).to(q.dtype)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams, sinks: Tensor | None
) -> Tensor:
    """scaled_dot_product_attention, grouped queries too, with a cap and sinks, for which that has no arguments.

    All f32. sinks: as the scores [..., queries, keys], of which they have one of each or all rows.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (q @ k.mT).mul_(params.scale)
    if params.softcap:
        s = s.div_(params.softcap).tanh_().mul_(params.softcap)
    if mask is not None:
        s = s.add_(mask)
    if sinks is None:
        return s.softmax(-1) @ v
    return torch.cat((s, sinks.expand(*s.shape[:-1], 1)), -1).softmax(-1)[..., :-1] @ v


def attend_prompt(
    q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, out: Tensor, reach: Tensor | None = None
) -> None:
    """q [n, heads, head_dim] are the last n tokens of a sequence with k, v [L, kv_heads, dim]. reach: [n], the last
    token that each attends to; None: itself."""
    computed = len(k) - len(q)  # tokens before q's first
    by_hand = bool(params.softcap) or params.sinks is not None
    k, v = (c.transpose(0, 1)[None] for c in (k, v))  # [1, kv_heads, L, dim]
    for start in range(0, len(q), QUERY_CHUNK):
        vec = q[start : start + QUERY_CHUNK].transpose(0, 1)[None].float()
        last = computed + start + vec.shape[2]  # keys from here on are in the future of all rows
        first = max(0, computed + start + 1 - params.window) if params.window else 0
        ends = None if reach is None else reach[start : start + QUERY_CHUNK, None]
        if ends is not None:
            last = max(last, int(ends.max()) + 1)
        shape = vec.shape[2], last - first
        mask = None
        if ends is not None:
            at = torch.arange(first, last, device=q.device)
            hidden = at > ends
            if params.window:
                own = torch.arange(computed + start, computed + start + shape[0], device=q.device)[:, None]
                hidden |= at <= own - params.window
            mask = torch.zeros(shape, device=q.device).masked_fill_(hidden, float("-inf"))
        elif shape[0] > 1 and (shape[0] < shape[1] or params.window or by_hand):
            mask = torch.full(shape, float("-inf"), device=q.device).triu_(1 + shape[1] - shape[0])
            if params.window:
                behind = torch.ones(shape, dtype=torch.bool, device=q.device).tril_(shape[1] - shape[0] - params.window)
                mask.masked_fill_(behind, float("-inf"))
        seen = k[:, :, first:last], v[:, :, first:last]
        if by_hand:
            sinks = None if params.sinks is None else params.sinks.view(-1, 1, 1)
            done = _softmax(vec, *seen, mask, params, sinks)
        else:
            causal = mask is None and shape[0] > 1
            done = scaled_dot_product_attention(
                vec, *seen, attn_mask=mask, scale=params.scale, enable_gqa=True, is_causal=causal
            )
        out[start : start + QUERY_CHUNK] = done[0].transpose(0, 1)


CANDIDATE = Candidate("reference.py", "CPUs", "all else", supports, run)
