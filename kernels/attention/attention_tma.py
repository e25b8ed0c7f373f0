"""Attention over the paged cache, whose blocks TMA brings: decode.cu, and prefill.cu on Hopper."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import jit
from ..device import HALF_SHARED, current_stream, device_caps, upload
from ..rope.fp8_cache import E4M3
from .backend import LOG2_E, CurrentKV, Part

DIMS = range(64, 257, 16)  # head sizes

# Of decode.cu.
SEQUENCES = 512  # at most: a block counts what is read of each
LEAST = 4  # tiles that are worth a block of their own, and adding its result to the others'
RUN_BYTES = 128  # of a token, that lie together in shared memory, or a half or quarter of them
FEW_BYTES = 1024  # about what of a sequence's last box, which is half empty on average, is fetched at a time
# Of prefill.cu.
ROWS = 128  # of queries that a block takes at once
KEYS = 128, 128, 96, 80  # of a tile, of heads of up to 64, 128, 192 and 256 elements
WIDENED_BYTES = 1 << 28  # of keys and values in e4m3 that prompts' steps have in 16 bits, of one layer
ROOM = 227 << 10  # bytes of shared memory
REGISTERS = 196  # of a thread, for scores, weights, sums and q; more would spill


def supports(part: Part) -> bool:
    if part.values.shape != part.keys.shape:
        return False
    if part.decodes:
        return supports_decode(part.decoding[0], part.keys, part.current_kv, part.scales)
    if part.scales is None:
        return supports_prefill(part.q, part.keys)
    return supports_widened(part)


def supports_widened(part: Part) -> bool:
    """Whether the prompts' blocks of a cache in e4m3 are to be widened for `prefill`, which takes 16 bits alone: they
    are written and read once more, which is little beside what many tokens multiply, where there is memory for it."""
    q, keys = part.q, part.keys
    if sum(part.rows.query_lens[part.first : part.stop]) < ROWS:
        return False
    size, kv_heads, dim = keys.shape[1:]
    blocks = sum(-(-length // size) for length in part.rows.kv_lens[part.first : part.stop])
    fits = 2 * blocks * size * kv_heads * dim * q.element_size() <= WIDENED_BYTES
    return fits and _boxed(q, keys, E4M3) and device_caps(q.device).hopper


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
        listed = prefill_work(rows.query_lens, rows.kv_lens, part.first, part.stop)
        items = rows.scratch[key] = upload(listed, part.q.device)
    return items


def run(part: Part, plan: Tensor | None) -> None:
    keys, values, rows, params = part.keys, part.values, part.rows, part.params
    if plan is None:
        q, out = part.decoding
        decode(q, keys, values, rows.block_tables, rows.lengths, out, *params, part.current_kv, part.scales)
    elif part.scales is None:
        prefill(part.q, keys, values, rows.block_tables, plan, part.out, *params)
    else:
        from ..rope import fp8_triton

        some, scales = widened_blocks(part), part.scales
        k, v = (fp8_triton.gather_blocks(x, scales, i, some.blocks, part.q.dtype) for i, x in enumerate((keys, values)))
        prefill(part.q, k, v, some.tables, plan, part.out, *params)


def supports_decode(q: Tensor, keys: Tensor, current_kv: CurrentKV | None = None, scales: Tensor | None = None) -> bool:
    """Whether `decode` takes q [n, heads, dim] and caches like keys [blocks, size, kv_heads, dim], with scales if they
    are e4m3."""
    if len(q) > SEQUENCES or not _boxed(q, keys, q.dtype if scales is None else E4M3):
        return False
    if scales is not None and (q.shape[2] % 32 or decode_tile(q.shape[2]) % keys.shape[1]):
        return False
    norms = current_kv.norms if current_kv else None
    narrow = norms is None or norms[0].dtype == norms[1].dtype == q.dtype
    return narrow and (current_kv is None or current_kv.cos_sin.cos.dtype == torch.float32)


def supports_prefill(q: Tensor, keys: Tensor) -> bool:
    """Whether `prefill` takes q [T, heads, dim] and caches like keys."""
    return _boxed(q, keys, q.dtype) and device_caps(q.device).hopper


def _boxed(q: Tensor, keys: Tensor, kept: torch.dtype) -> bool:
    """Whether TMA can bring them."""
    size, dim = keys.shape[1], q.shape[2]
    if not q.is_cuda or not device_caps(q.device).has_tma or q.element_size() != 2 or keys.dtype != kept:
        return False
    whole = size % 8 == 0  # a box is of one block, and 8 rows are a swizzle
    aligned = all(x.data_ptr() % 16 == 0 for x in (q, keys)) and q.stride(0) % 8 == 0
    side_by_side = q.stride()[1:] == (dim, 1) and keys.is_contiguous()
    counted = keys.shape[2] * SEQUENCES <= jit.COUNTERS  # by decode: one for each sequence and key head
    group = 16 if dim <= 128 else 8  # query heads of a key head; decode has no registers for more
    return dim in DIMS and whole and aligned and side_by_side and counted and q.shape[1] <= group * keys.shape[2]


def decode(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, scale: float, window: int,
    softcap: float, sinks: Tensor | None, current_kv: CurrentKV | None = None, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """The newest token of each of n sequences, as attention_triton.decode: q, out [n, heads, head_dim], out contiguous.

    With `current_kv`, q is neither normed nor rotated yet, and the caches do not hold these tokens yet. What has made
    q, k and v, a GEMM, may still run: all else that is read must be what the kernels before that one wrote.
    """
    (n, heads, dim), (_, size, kv_heads, _) = q.shape, keys.shape
    group, tile, wide = heads // kv_heads, decode_tile(dim), keys.element_size()
    box, (run, few) = math.gcd(size, tile), decode_runs(dim * wide)
    few = min(box, few)
    stages, shared = _decode_room(group, dim, wide)
    kernel = jit.kernel(
        "decode", "decode", q.dtype, shared, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, SIZE=size, BOX=box, FEW=few,
        TILE=tile, STAGES=stages, LEAST=LEAST, SEQUENCES=SEQUENCES, ROOM=shared,
        ROTATE=int(current_kv is not None), NORM=int(current_kv is not None and current_kv.norms is not None),
        WINDOW=window,
        SOFTCAP=int(softcap > 0), SINKS=int(sinks is not None), FP8=int(scales is not None),
    )  # fmt: skip
    grid = max(2 * device_caps(q.device).num_sms, kv_heads)
    parts = torch.empty(grid, 2, group, dim + 1, dtype=torch.float32, device=q.device)
    sums = parts.view(-1)[grid * 2 * group * dim :]
    arrived = jit.counters(q.device, current_stream())
    # What a kernel of rotated tokens does not touch.
    k, v, (cos, sin, *_), norms, slots = current_kv if current_kv else (q, q, (q, q), None, lengths)
    q_weight, k_weight, eps = norms if norms else (q, q, 0.0)
    shape = dim * wide // run, run // 2
    maps = *_caches(keys, values, box, *shape), *_caches(keys, values, few, *shape)
    kernel(
        (grid, 1, 1), (tile // 16 + 2) * 32, *maps, q, k, v, cos, sin, q_weight, k_weight, slots, keys, values,
        sums if scales is None else scales, tables, lengths, out, parts, sums, arrived,
        sums if sinks is None else sinks, n, q.stride(0), k.stride(0), v.stride(0), tables.stride(0), scale * LOG2_E,
        float(eps), float(softcap), shared=shared,
    )  # fmt: skip


def decode_tile(dim: int) -> int:
    """Tokens of a tile: a warp to 16 of them."""
    return 64 if dim <= 128 else 32


def decode_runs(token: int) -> tuple[int, int]:
    """How a token of so many bytes lies in shared memory: bytes of a run, of which each is as wide as one of TMA's
    swizzles, and the tokens that are fetched at once of a box with few. They are a multiple of 8 runs, which a swizzle
    repeats after."""
    run = math.gcd(token, RUN_BYTES)
    least = 8 // math.gcd(8, token // run)
    return run, max(FEW_BYTES // token // least, 1) * least


def _decode_room(group: int, dim: int, wide: int = 2) -> tuple[int, int]:
    """Tiles that a block holds at once, and all bytes of its shared memory, as decode.cu lays it out. wide: bytes of an
    element; of one, there are scales."""
    rows, warps = 16 if group > 8 else 8, decode_tile(dim) // 16
    heads = rows * (dim + 8) * 2 + dim * 2 + 80
    rest = 1024 + warps * group * (dim + 2) * 4 + 2 * heads + SEQUENCES * 4
    tile = 2 * decode_tile(dim) * (dim * wide + (wide == 1))
    stages = min(6, (HALF_SHARED - rest) // tile)
    return stages, rest + stages * tile


def prefill_work(query_lens: list[int], kv_lens: list[int], first: int, stop: int) -> np.ndarray:
    """What blocks take one by one, the longest first: [n, 8] int32 of sequence, first row, rows, position, length.

    Of sequences first:stop, whose query_lens[i] newest tokens of kv_lens[i] are in the step, row after row.
    """
    items = []
    row = sum(query_lens[:first])
    for i in range(first, stop):
        count, length = query_lens[i], kv_lens[i]
        for at in range(0, count, ROWS):
            items.append((i, row + at, min(ROWS, count - at), length - count + at, length, 0, 0, 0))
        row += count
    items.sort(key=lambda item: -(item[2] + item[3]))
    return np.array(items, np.int32)


class PrefillRoom(NamedTuple):
    tile: int  # keys
    stages: int  # tiles of keys, and as many of values, that lie in shared memory
    held: int  # steps of 16 elements of q that lie in registers
    shared: int  # bytes of shared memory


def prefill_room(dim: int) -> PrefillRoom:
    """How prefill.cu shares out its memory and registers: in shared memory a head has runs of 64 elements."""
    runs = -(-dim // 64)
    tile, row = KEYS[runs - 1], runs * 128  # bytes
    stages = ((ROOM - 1024) // row - ROWS) // (2 * tile)
    held = (REGISTERS - tile // 2 - tile // 4 - dim // 2) // 4
    return PrefillRoom(tile, stages, min(held, dim // 16), 1024 + (ROWS + 2 * stages * tile) * row)


def prefill(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, items: Tensor, out: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """The rows of `items`, which is prefill_work() on the device; q and out [T, heads, dim], out contiguous."""
    (rows, heads, dim), (_, size, kv_heads, _) = q.shape, keys.shape
    tile, stages, held, shared = prefill_room(dim)
    box = math.gcd(size, tile)
    kernel = jit.kernel(
        "prefill", "prefill", q.dtype, shared, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, SIZE=size, BOX=box,
        TILE=tile, STAGES=stages, HELD=held, WINDOW=window, SOFTCAP=int(softcap > 0), SINKS=int(sinks is not None),
    )  # fmt: skip
    of_q = jit.tensor_map(q.data_ptr(), rows, heads * dim, ROWS, q.stride(0))
    of_k, of_v = _caches(keys, values, box)
    grid = min(device_caps(q.device).num_sms, len(items) * heads)
    kernel(
        (grid, 1, 1), 384, of_q, of_k, of_v, items, len(items), tables, tables.stride(0), out,
        q if sinks is None else sinks, scale * LOG2_E, float(softcap), shared=shared,
    )  # fmt: skip


def _caches(
    keys: Tensor, values: Tensor, box: int, runs: int = 0, run: int = 64
) -> tuple[jit.TensorMap, jit.TensorMap]:
    blocks, size, kv_heads, dim = keys.shape
    width = kv_heads * dim * keys.element_size() // 2  # maps count elements of two bytes
    of_k, of_v = (jit.tensor_map(x.data_ptr(), blocks * size, width, box, width, runs, run) for x in (keys, values))
    return of_k, of_v
