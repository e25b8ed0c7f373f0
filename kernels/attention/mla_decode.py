"""Decoding sequences of multi-head latent attention by mla_decode.cu, in DeepSeek's sizes: 512 + 64 elements a token,
in 16 bits or e4m3. With TMA caches in e4m3 go to mla_decode_e4m3.py.

As a backend it attends to latents as they are cached, as mla_triton.py does, which takes everything else.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import jit
from ..device import current_stream, device_caps
from ..rope.fp8_cache import E4M3
from . import mla_decode_e4m3
from .backend import LOG2_E, AttentionParams, Part
from .mla_parts import AT_ONCE, LATENT, PANEL, PART, ROWS, SPLIT, THREADS, WIDTH

# Sequences of a step from which on this kernel is chosen, instead of Triton's. Of one that is faster for contexts of
# 1000 to 10,000 tokens, of 16 slower for all (benchmarks/ops_mla.py, H200, 16 heads); between these nothing was timed.
# A graph's kernel is the same for contexts of all lengths, so these do not count. Of a cache in e4m3 it always is.
LEAST_SEQUENCES = 4

TILE = 32  # tokens that are multiplied at once
MAX_KV_SPLITS = 64
MOST_PANELS = 8
# Bytes that a block has beside panels: its scores, softmax weights, and what it keeps of each head.
FIXED = 4 * ROWS * (TILE + 8) * 4 + ROWS * (TILE * 2 + 16) + 3 * ROWS * 4


def supports(part: Part) -> bool:
    """Values are the first part of the keys, of one head; q in 16 bits, the cache too or in e4m3, and as a block copies
    it."""
    q, keys, values, params = part.q, part.keys, part.values, part.params
    if not part.decodes or (part.scales is None and part.stop < LEAST_SEQUENCES) or part.current_kv is not None:
        return False
    shared = keys.shape[2] == 1 and keys.data_ptr() == values.data_ptr()
    sizes = (keys.shape[3], values.shape[3]) == (WIDTH, LATENT) and q.element_size() == 2
    if part.scales is None:
        sizes = sizes and keys.dtype == q.dtype
    else:  # a panel's scales lie side by side
        sizes = sizes and keys.dtype == E4M3 and keys.shape[1] % PANEL == 0 and jit.plain(part.scales)
    aligned = jit.plain(keys, part.out) and q.data_ptr() % 16 == 0 and q.stride(0) % 8 == 0
    return shared and sizes and aligned and q.stride()[1:] == (WIDTH, 1) and params == AttentionParams(params.scale)


def plan(part: Part) -> int:
    """How many KV splits each sequence has at most."""
    blocks, caps = part.stop * -(-part.q.shape[1] // ROWS), device_caps(part.q.device)
    per_sm = occupancy(part.q.device, part.scales is not None)[1]
    return choose_kv_splits(blocks, max(part.rows.kv_lens[: part.stop]), caps.num_sms * per_sm)


def run(part: Part, plan: int) -> None:
    q, out = part.decoding
    rows = part.rows
    decode(
        q, part.keys[:, :, 0], rows.block_tables, rows.lengths, out, part.params.scale, plan, scales=part.scales
    )  # fmt: skip


def choose_kv_splits(blocks: int, longest: int, room: int) -> int:
    """A power of two: the most KV splits of a sequence, when there are `blocks` for each split, and room for so
    many at once."""
    splits = 1
    while splits < MAX_KV_SPLITS and 2 * blocks * splits <= room and longest > splits * TILE:
        splits *= 2
    return splits


@functools.cache
def occupancy(device: torch.device, fp8: bool = False) -> tuple[int, int]:
    """Panels that a block holds, and blocks of a multiprocessor."""
    if device.type != "cuda" or device_caps(device).has_tma:  # two blocks of device.HALF_SHARED
        return 5, 2  # panels in 16 bits: mla_decode_e4m3.cu has none
    # CUDA keeps 1024 bytes of each block's shared memory.
    room = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024
    return min(MOST_PANELS, (room - FIXED) // panel_bytes(fp8)), 1


def sizes(heads: int, block_size: int, panels: int, blocks: int, fp8: bool = False) -> dict[str, int]:
    """What mla_decode.cu is compiled for."""
    room = shared_bytes(panels, fp8)
    return dict(HEADS=heads, SIZE=block_size, HELD=panels, BLOCKS=blocks, SPLIT=SPLIT, ROOM=room, FP8=int(fp8))


def panel_bytes(fp8: bool) -> int:
    return PANEL * (WIDTH + 2 if fp8 else WIDTH * 2)


def shared_bytes(panels: int, fp8: bool = False) -> int:
    return panels * panel_bytes(fp8) + FIXED


def decode(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, scale: float, most: int, fill: int = 0,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """The newest token of each of n sequences, of up to `most` splits: q [n, heads, 576], cache [blocks, block_size,
    576], out [n, heads, 512], contiguous. A sequence of length 0 gives zeros. fill: splits of a short sequence; as many
    as find a multiprocessor idle unless given. scales: of a cache in e4m3, [blocks, 1, 2, block_size], of latents and
    of the rope part; block_size is a multiple of 16 then.

    What comes before on the stream may still run, and write q and the newest tokens: all else that is read must be
    what the kernels before that one wrote.
    """
    n, heads, _ = q.shape
    fp8, size = scales is not None, cache.shape[1]
    blocks = n * -(-heads // ROWS)
    fill = fill or min(AT_ONCE, device_caps(q.device).num_sms // blocks)
    splits = arrived = out  # one split keeps nothing
    if most > 1:
        assert blocks * most <= jit.COUNTERS  # choose_kv_splits does not make so many
        splits = q.new_empty(blocks, most, PART, dtype=torch.float32)
        arrived = jit.counters(q.device, current_stream())
    rest = tables, lengths, out, splits, arrived, q.stride(0), tables.stride(0), fill, scale * LOG2_E
    if scales is not None and mla_decode_e4m3.supports(q.device):
        mla_decode_e4m3.mla_decode_e4m3((blocks, most, 1), q, cache, scales, *rest)
        return
    panels, per_sm = occupancy(q.device, fp8)
    shared = shared_bytes(panels, fp8)
    kernel = jit.kernel("mla_decode", "mla_decode", q.dtype, shared, **sizes(heads, size, panels, per_sm, fp8))
    of_scales = lengths if scales is None else scales
    kernel((blocks, most, 1), THREADS, q, cache, of_scales, *rest, shared=shared)
