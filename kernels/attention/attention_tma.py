"""Attention over the paged cache, whose blocks TMA brings: decode.py, and prefill.py on Hopper."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..device import device_caps, upload
from ..rope.fp8_cache import E4M3
from . import decode, prefill
from .backend import Part
from .kv_boxes import boxed

WIDENED_BYTES = 1 << 28  # of keys and values in e4m3 that prompts' steps have in 16 bits, of one layer


def supports(part: Part) -> bool:
    if part.values.shape != part.keys.shape:
        return False
    if part.decodes:
        return decode.supports_decode(part.stop, part.q, part.keys, part.current_kv, part.scales)
    if part.scales is None:
        return prefill.supports_prefill(part.q, part.keys)
    return supports_widened(part)


def supports_widened(part: Part) -> bool:
    """Whether the prompts' blocks of a cache in e4m3 are to be widened for prefill.cu, which takes 16 bits alone: they
    are written and read once more, which is little beside what many tokens multiply, where there is memory for it."""
    q, keys = part.q, part.keys
    if sum(part.rows.query_lens[part.first : part.stop]) < prefill.ROWS:
        return False
    size, kv_heads, dim = keys.shape[1:]
    blocks = sum(-(-length // size) for length in part.rows.kv_lens[part.first : part.stop])
    fits = 2 * blocks * size * kv_heads * dim * q.element_size() <= WIDENED_BYTES
    return fits and boxed(q, keys, E4M3) and device_caps(q.device).hopper


class WidenedBlocks(NamedTuple):
    """The blocks of a part's sequences, one after the other."""

    blocks: Tensor  # [n] int32, of the cache
    tables: Tensor  # [sequences of the step, most blocks of one] int32: the sequences' blocks among these


def widened_blocks(part: Part) -> WidenedBlocks:
    """Made once a step."""
    key = "widened blocks", part.first
    found = part.rows.scratch.get(key)
    if found is None:
        rows, size = part.rows, part.keys.shape[1]
        counts = np.array([-(-length // size) for length in rows.kv_lens[part.first : part.stop]])
        starts = np.cumsum(counts) - counts
        tables = np.zeros((len(rows.kv_lens), counts.max()), np.int32)
        tables[part.first : part.stop] = starts[:, None] + np.arange(counts.max())
        device = rows.block_tables.device
        sequence = upload(np.repeat(np.arange(part.first, part.stop), counts), device)
        place = upload(np.arange(counts.sum()) - np.repeat(starts, counts), device)
        blocks = rows.block_tables[sequence, place].contiguous()
        found = part.rows.scratch[key] = WidenedBlocks(blocks, upload(tables, device))
    return found


def plan(part: Part) -> Tensor | None:
    """Of prompts: prefill_work() on the device, the same for all layers."""
    if part.decodes:
        return None
    rows, key = part.rows, "prefill_work"
    items = rows.scratch.get(key)
    if items is None:
        listed = prefill.prefill_work(rows.query_lens, rows.kv_lens, part.first, part.stop)
        items = rows.scratch[key] = upload(listed, part.q.device)
    return items


def run(part: Part, plan: Tensor | None) -> None:
    keys, values, rows, params = part.keys, part.values, part.rows, part.params
    if plan is None:
        decode.decode(
            part.stop, part.q, keys, values, rows.block_tables, rows.lengths, part.out, *params, part.current_kv,
            part.scales,
        )  # fmt: skip
    elif part.scales is None:
        prefill.prefill(part.q, keys, values, rows.block_tables, plan, part.out, *params)
    else:
        from ..rope import fp8_triton

        some, scales = widened_blocks(part), part.scales
        k, v = (fp8_triton.gather_blocks(x, scales, i, some.blocks, part.q.dtype) for i, x in enumerate((keys, values)))
        prefill.prefill(part.q, k, v, some.tables, plan, part.out, *params)
