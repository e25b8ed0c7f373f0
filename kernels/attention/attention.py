"""Attention over a paged cache, for any mix of prompts, chunks of prompts and single tokens.

The torch reference is also what runs on CPUs. It gathers keys token by token, not block by block: a padded position
reads its sequence's own last token instead of a stranger's block, so nothing that lies in unused slots, not even a
NaN, can reach a result, and no pass over the gathered keys is needed to clear them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..device import device_caps
from ..rope.rope import CosSin, QKNorm, rope_and_store_kv
from . import attention_tma, cpu_decode

# Keys gathered at once: they and their values should still lie in a core's cache when the scores are computed.
GATHER_BYTES = 1 << 20
# A group of decoding sequences is padded to its longest by at most this share of its tokens, plus SLACK tokens,
# which cost less than the calls of one more group.
PADDING = 0.25
SLACK = 256
# Query rows of a prompt per call: the causal mask is [PIECE, keys], and keys after a piece are not touched.
PIECE = 256
# On GPUs, whole prompts from this length on go to cuDNN where attention_tma does not take them, padded to a multiple of
# CUDNN_STEP: it plans anew for every length.
CUDNN_FROM = 2048
CUDNN_STEP = 512


class AttentionMetadata(Protocol):
    """What attention reads of a batch; rank/model/batch.py explains the fields."""

    slots: Tensor  # read by store_and_attend alone
    block_tables: Tensor
    lengths: Tensor
    query_starts: Tensor
    sample_at: Tensor  # read by halves.attention alone
    num_decodes: int
    query_lens: list[int]
    kv_lens: list[int]
    scratch: dict[str, Any]


class AttentionParams(NamedTuple):
    """How a layer weighs its keys."""

    scale: float
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0: all
    softcap: float = (
        0.0  # scores s become softcap * tanh(s / softcap), before the mask (Gemma 2, arXiv 2408.00118); 0: stay
    )


def store_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: CosSin,
    norms: QKNorm | None,
    cache: tuple[Tensor, Tensor],
    rows: AttentionMetadata,
    scores: AttentionParams,
) -> Tensor:
    """rope_and_store_kv and then paged_attention of what it returns. q, k and v may be overwritten.

    A step of decoding sequences alone is one kernel on GPUs, where heads are rotated as a whole and not interleaved.
    """
    if q.is_cuda and supports_one_kernel(q, k, v, cos_sin, cache[0], rows):
        return decode_cuda(q, k, v, cos_sin, norms, cache, rows, scores)
    q = rope_and_store_kv(q, k, v, cos_sin, norms, cache, rows.slots)
    return paged_attention(q, *cache, rows, scores)


def supports_one_kernel(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: CosSin, keys: Tensor, rows: AttentionMetadata
) -> bool:
    dim = q.shape[2]
    side_by_side = all(x.stride()[1:] == (dim, 1) for x in (q, k, v))
    whole = cos_sin.cos.shape[-1] == dim and not cos_sin.interleaved
    return 0 < len(q) == rows.num_decodes and whole and side_by_side and keys.dtype == q.dtype


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: AttentionMetadata, scores: AttentionParams
) -> Tensor:
    """softmax(scale q k^T) v for every token of the step, causal within its sequence: [T, heads * head_dim], q's dtype.

    q: [T, heads, head_dim]. keys, values: [blocks, block_size, kv_heads, head_dim], with this step's tokens written.
    Query head h reads key head h // (heads / kv_heads) (grouped queries: Ainslie et al. 2023, arXiv 2305.13245).
    Computed in f32. On GPUs a decoding sequence may have length 0, which gives zeros: it fills a captured batch up.
    """
    if q.is_cuda:
        return paged_attention_cuda(q, keys, values, rows, scores)
    if rows.num_decodes == len(q) and cpu_decode.supports(q, keys, rows.block_tables):
        return cpu_decode.decode(q, keys, values, rows.block_tables, rows.lengths, *scores).flatten(1)
    return paged_attention_reference(q, keys, values, rows, scores)


@dataclass(slots=True)
class _Group:
    """Decoding sequences that are computed together: rows start:stop of the plan's order."""

    start: int
    stop: int
    slots: Tensor  # [n * L]
    mask: Tensor | None  # [n, 1, 1, L] f32; None: all of equal length


@dataclass(slots=True)
class _Prompt:
    """A sequence with several tokens in this step, T-rows start:stop."""

    start: int
    stop: int
    slots: Tensor  # [L]


@dataclass(slots=True)
class _ReferencePlan:
    order: Tensor | None  # [D]: decode rows in the groups' order; None: as they are
    groups: list[_Group]
    prompts: list[_Prompt]
    # Where keys and values are gathered, [2, most slots, kv_heads, head_dim]: one piece of memory for all groups of all
    # layers stays in the core's cache, and costs its page faults once.
    gathered: Tensor

    def gather(self, cache: tuple[Tensor, Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, kv_heads, head_dim] in f32, valid until the next call."""
        k, v = (
            torch.index_select(c.view(-1, *c.shape[2:]), 0, slots, out=room[: len(slots)])
            for c, room in zip(cache, self.gathered, strict=True)
        )
        return k.float(), v.float()


def paged_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, rows: AttentionMetadata, scores: AttentionParams
) -> Tensor:
    name = f"attention {scores.window}"
    plan = rows.scratch.get(name)
    if plan is None:  # the first layer of this step
        plan = rows.scratch[name] = _make_plan(rows, keys, scores.window)
    cache = keys, values
    decodes = rows.num_decodes
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if decodes:
        rows_q = q[:decodes] if plan.order is None else q.index_select(0, plan.order)
        parts = []
        for group in plan.groups:
            k, v = plan.gather(cache, group.slots)
            parts.append(_decode(rows_q[group.start : group.stop], k, v, group.mask, scores))
        if plan.order is None:
            torch.cat(parts, out=out[:decodes])
        else:
            out.index_copy_(0, plan.order, torch.cat(parts))
    for one in plan.prompts:
        k, v = plan.gather(cache, one.slots)
        _attend_prompt(q[one.start : one.stop], k, v, scores, out[one.start : one.stop])
    return out.flatten(1)


def _make_plan(rows: AttentionMetadata, keys: Tensor, window: int) -> _ReferencePlan:
    block_size = keys.shape[1]
    row_bytes = keys.shape[2] * keys.shape[3] * 4  # gathered keys are f32
    lens = [min(n, window) if window else n for n in rows.kv_lens[: rows.num_decodes]]
    order = sorted(range(len(lens)), key=lens.__getitem__)
    device = keys.device
    identity = order == list(range(len(lens)))
    order_tensor = torch.tensor(order, dtype=torch.int64, device=device)
    groups = []
    for start, stop in _split([lens[i] for i in order], row_bytes):
        longest = lens[order[stop - 1]]
        members = order_tensor[start:stop]
        length = rows.lengths.index_select(0, members)[:, None].long()  # [n, 1]
        span = length.clamp(max=longest)
        at = torch.arange(longest, device=device)
        positions = torch.minimum(length - span + at, length - 1)  # [n, L]
        blocks = rows.block_tables.index_select(0, members).long().gather(1, positions // block_size)
        mask = None
        if lens[order[start]] < longest:
            mask = torch.zeros(positions.shape, device=device).masked_fill_(at >= span, float("-inf"))[:, None, None]
        groups.append(_Group(start, stop, (blocks * block_size + positions % block_size).flatten(), mask))
    prompts = []
    start = rows.num_decodes
    for i in range(rows.num_decodes, len(rows.query_lens)):
        stop = start + rows.query_lens[i]
        positions = torch.arange(rows.kv_lens[i], device=device)
        slots = rows.block_tables[i].long()[positions // block_size] * block_size + positions % block_size
        prompts.append(_Prompt(start, stop, slots))
        start = stop
    most = max((len(slots) for slots in [g.slots for g in groups] + [p.slots for p in prompts]), default=0)
    room = torch.empty(2, most, *keys.shape[2:], dtype=keys.dtype, device=device)
    return _ReferencePlan(None if identity else order_tensor, groups, prompts, room)


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


def _decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: AttentionParams) -> Tensor:
    """One token each of n sequences: q [n, heads, head_dim], as is the result; k, v [n * L, kv_heads, head_dim]."""
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    # The query heads that share a key head stand as rows of one small matrix; keys are not repeated.
    grouped = q.reshape(n, kv_heads, heads // kv_heads, dim).float()
    k, v = (c.view(n, -1, kv_heads, dim).transpose(1, 2) for c in (k, v))
    if scores.softcap:
        out = _softcapped(grouped, k, v, mask, scores)
    else:
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scores.scale)
    return out.reshape(n, heads, dim).to(q.dtype)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: AttentionParams) -> Tensor:
    """scaled_dot_product_attention, grouped queries too, but with a cap, for which that has no argument. All f32."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (q @ k.mT).mul_(scores.scale / scores.softcap).tanh_().mul_(scores.softcap)
    return (s if mask is None else s.add_(mask)).softmax(-1) @ v


def _attend_prompt(q: Tensor, k: Tensor, v: Tensor, scores: AttentionParams, out: Tensor) -> None:
    """q [n, heads, head_dim] are the last n tokens of a sequence with k, v [L, kv_heads, head_dim]."""
    computed = len(k) - len(q)  # tokens before q's first
    k, v = (c.transpose(0, 1)[None] for c in (k, v))  # [1, kv_heads, L, head_dim]
    for start in range(0, len(q), PIECE):
        piece = q[start : start + PIECE].transpose(0, 1)[None].float()
        last = computed + start + piece.shape[2]  # keys from here on are in the future of all rows
        first = max(0, computed + start + 1 - scores.window) if scores.window else 0
        shape = piece.shape[2], last - first
        mask = None
        if shape[0] > 1 and (shape[0] < shape[1] or scores.window or scores.softcap):
            mask = torch.full(shape, float("-inf"), device=q.device).triu_(1 + shape[1] - shape[0])
            if scores.window:
                behind = torch.ones(shape, dtype=torch.bool, device=q.device).tril_(shape[1] - shape[0] - scores.window)
                mask.masked_fill_(behind, float("-inf"))
        seen = k[:, :, first:last], v[:, :, first:last]
        if scores.softcap:
            done = _softcapped(piece, *seen, mask, scores)
        else:
            causal = mask is None and shape[0] > 1
            done = scaled_dot_product_attention(
                piece, *seen, attn_mask=mask, scale=scores.scale, enable_gqa=True, is_causal=causal
            )
        out[start : start + PIECE] = done[0].transpose(0, 1)


def decode_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: CosSin,
    norms: QKNorm | None,
    cache: tuple[Tensor, Tensor],
    rows: AttentionMetadata,
    scores: AttentionParams,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _decode_rows(q, cache, rows, scores, out, attention_tma.CurrentKV(k, v, cos_sin, norms, rows.slots))
    return out.flatten(1)


def _decode_rows(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    rows: AttentionMetadata,
    scores: AttentionParams,
    out: Tensor,
    newest: attention_tma.CurrentKV | None = None,
) -> None:
    """Without `newest`, in a step with prompts, what is in q is rotated, and the caches hold it."""
    keys, values = cache
    tables, lengths = rows.block_tables, rows.lengths
    if attention_tma.supports(q, keys, newest):
        attention_tma.decode(q, keys, values, tables, lengths, out, *scores, newest)
        return
    from . import attention_triton

    longest = max(rows.kv_lens[: rows.num_decodes])
    programs, num_sms = rows.num_decodes * keys.shape[2], device_caps(q.device).num_sms
    splits = attention_triton.choose_kv_splits(programs, min(longest, scores.window or longest), num_sms)
    if newest is None and splits > 1:
        # All that there may be, or none: each number is a kernel of its own, to be compiled in the middle of work.
        splits = attention_triton.MAX_KV_SPLITS
    attention_triton.decode(q, keys, values, tables, lengths, out, *scores, splits, newest)


def paged_attention_cuda(
    q: Tensor, keys: Tensor, values: Tensor, rows: AttentionMetadata, scores: AttentionParams
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    n = rows.num_decodes
    if n:
        _decode_rows(q[:n], (keys, values), rows, scores, out[:n])
    start, first = n, n  # of the prompts that wait for one common launch: their first row of q, their first sequence
    for i in range(n, len(rows.query_lens)):
        count = rows.query_lens[i]
        if _suits_cudnn(q, keys, rows, i, scores):
            _launch_prompts(q, keys, values, rows, scores, out, first, i)
            _whole_prompt(
                q[start : start + count], keys, values, rows.block_tables[i], scores, out[start : start + count]
            )
            first = i + 1
        start += count
    _launch_prompts(q, keys, values, rows, scores, out, first, len(rows.query_lens))
    return out.flatten(1)


def _launch_prompts(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scores: AttentionParams,
    out: Tensor,
    first: int,
    stop: int,
) -> None:
    if first == stop:
        return
    if attention_tma.supports_prefill(q, keys):
        name = f"prompts {first}:{stop}"
        if (items := rows.scratch.get(name)) is None:  # the first layer of this step
            listed = torch.from_numpy(
                attention_tma.prefill_work(rows.query_lens, rows.kv_lens, first, stop)
            ).pin_memory()
            items = rows.scratch[name] = listed.to(q.device, non_blocking=True)
        attention_tma.prefill(q, keys, values, rows.block_tables, items, out, *scores)
    else:
        from . import attention_triton

        longest = max(rows.query_lens[first:stop])
        tables, lengths, starts = rows.block_tables, rows.lengths, rows.query_starts
        attention_triton.prefill(q, keys, values, tables, lengths, starts, out, *scores, first, stop - first, longest)


def _suits_cudnn(q: Tensor, keys: Tensor, rows: AttentionMetadata, i: int, scores: AttentionParams) -> bool:
    whole = rows.query_lens[i] == rows.kv_lens[i] and rows.kv_lens[i] >= CUDNN_FROM
    plain = not scores.window and not scores.softcap
    takes = whole and plain and q.element_size() == 2 and q.shape[2] % 8 == 0 and q.shape[2] <= 128
    return takes and not attention_tma.supports_prefill(q, keys)  # which is as fast, without a plan for each length


def _whole_prompt(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, scores: AttentionParams, out: Tensor) -> None:
    """A sequence whose tokens are all in this step, q [L, heads, head_dim], by cuDNN over gathered keys."""
    length, block_size = len(q), keys.shape[1]
    blocks = -(-length // block_size)
    padded = -(-blocks * block_size // CUDNN_STEP) * CUDNN_STEP
    k, v = room = keys.new_empty(2, padded, *keys.shape[2:])
    for cache, part in ((keys, k), (values, v)):
        torch.index_select(cache, 0, table[:blocks], out=part[: blocks * block_size].view(blocks, *cache.shape[1:]))
    room[:, length:] = 0  # no query reads them, but zero times the NaN that may lie there is a NaN
    if padded > length:
        q = torch.cat((q, q.new_zeros(padded - length, *q.shape[1:])))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        done = scaled_dot_product_attention(q, k, v, scale=scores.scale, is_causal=True, enable_gqa=True)
    out.copy_(done[0, :, :length].transpose(0, 1))
