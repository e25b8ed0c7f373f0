"""The kernel mla_decode.cu: decoding sequences of multi-head latent attention in DeepSeek's sizes, 512 + 64 elements a
token, in 16 bits or e4m3.

As a backend it attends to latents as they are cached, as mla_triton.py does, which takes everything else.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..candidate import Candidate
from ..device import current_stream, device_caps
from ..rope.fp8_cache import E4M3
from .backend import LOG2_E, AttentionParams, Part, Selection

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
THREADS = 256
ROWS = 16  # heads of a block
PANEL = 16  # tokens that are copied at once
LEAST = 32  # tokens of a KV split
SPLIT = 256  # tokens: about what is worth a block of its own, where all multiprocessors have one
AT_ONCE = 4  # KV splits of a sequence that one block adds up
PART = ROWS * LATENT + ROWS  # floats that are kept of a part

# Sequences of a step from which on this kernel is chosen, instead of Triton's. Of one that is faster for contexts of
# 1000 to 10,000 tokens, of 16 slower for all (benchmarks/ops_mla.py, H200, 16 heads); between these nothing was timed.
# A graph's kernel is the same for contexts of all lengths, so these do not count. Of a cache in e4m3 it always is.
# 2048 chosen tokens of 4 sequences take Triton 12.8 us and this one 16.0, of 16 sequences 30.6 and 21.9.
LEAST_SEQUENCES, LEAST_SELECTED = 4, 16

MAX_KV_SPLITS = 64
MAX_PANELS = 8


def supports(part: Part) -> bool:
    """Values are the first part of the keys, of one head; q in 16 bits, the cache too or in e4m3, and as a block copies
    it."""
    q, keys, values, params = part.q, part.keys, part.values, part.params
    if not part.decodes or part.rows.query_len > 1:
        return False
    least = LEAST_SELECTED if isinstance(part.rows, Selection) else LEAST_SEQUENCES
    if (part.scales is None and part.stop < least) or part.current_kv is not None:
        return False
    shared = keys.shape[2] == 1 and keys.data_ptr() == values.data_ptr()
    sizes = (keys.shape[3], values.shape[3]) == (WIDTH, LATENT) and q.element_size() == 2
    if part.scales is None:
        sizes = sizes and keys.dtype == q.dtype
    else:  # a panel's scales lie side by side
        sizes = sizes and keys.dtype == E4M3 and part.table_size % PANEL == 0 and jit.plain(part.scales)
    aligned = jit.plain(keys, part.out) and q.data_ptr() % 16 == 0 and q.stride(0) % 8 == 0
    return shared and sizes and aligned and q.stride()[1:] == (WIDTH, 1) and params == AttentionParams(params.scale)


def plan(part: Part) -> int:
    """How many KV splits each sequence has at most."""
    blocks, caps = part.stop * -(-part.q.shape[1] // ROWS), device_caps(part.q.device)
    per_sm = choose_tiles(part.q.device, part.scales is not None).per_sm
    return choose_kv_splits(blocks, max(part.rows.kv_lens[: part.stop]), caps.num_sms * per_sm)


def run(part: Part) -> None:
    q, out = part.decoding
    tables, lengths, scale = part.rows.block_tables, part.rows.lengths, part.params.scale
    cache = part.keys.view(-1, part.table_size, WIDTH)
    decode(q, cache, tables, lengths, out, scale, plan(part), scales=part.scales)


def choose_kv_splits(blocks: int, longest: int, room: int) -> int:
    """A power of two: the most KV splits of a sequence, when there are `blocks` for each split, and room for so
    many at once."""
    splits = 1
    while splits < MAX_KV_SPLITS and 2 * blocks * splits <= room and longest > splits * LEAST:
        splits *= 2
    return splits


class Tiles(NamedTuple):
    """How a block holds tokens: the header that brings them (mla_decode.cu), the tokens of a tile, the panels that it
    holds, and the blocks of a multiprocessor."""

    header: str
    tile: int
    panels: int
    per_sm: int


@functools.cache
def choose_tiles(device: torch.device, fp8: bool) -> Tiles:
    if device.type != "cuda" or device_caps(device).has_tma:  # two blocks of device.HALF_SHARED
        return Tiles("mla_tma", 64, 8, 2) if fp8 else Tiles("mla_cp_async", 32, 5, 2)
    # CUDA keeps 1024 bytes of each block's shared memory.
    free = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024
    panels = min(MAX_PANELS, (free - shared_bytes(Tiles("mla_cp_async", 32, 0, 1), fp8)) // panel_bytes(fp8))
    return Tiles("mla_cp_async", 32, panels, 1)


def panel_bytes(fp8: bool) -> int:
    return PANEL * (WIDTH + 2 if fp8 else WIDTH * 2)


def shared_bytes(tiles: Tiles, fp8: bool) -> int:
    """Panels; scores, softmax weights, and what is kept of each head. TMA's panels are five boxes of 128 bytes a row
    and two scales, and begin at a multiple of 1024; it has the scores of the rotated elements apart."""
    tma = tiles.header == "mla_tma"
    panels = 1024 + tiles.panels * PANEL * (5 * 128 + 2) if tma else tiles.panels * panel_bytes(fp8)
    return panels + (4 + tma) * ROWS * (tiles.tile + 8) * 4 + ROWS * (tiles.tile * 2 + 16) + 3 * ROWS * 4


def sizes(heads: int, block_size: int, tiles: Tiles, fp8: bool = False) -> dict[str, int | str]:
    """Compile-time constants of mla_decode.cu."""
    return dict(
        HEADS=heads, SIZE=block_size, TILES=tiles.header, TILE=tiles.tile, RING_PANELS=tiles.panels,
        BLOCKS=tiles.per_sm, SPLIT=SPLIT, SMEM_BYTES=shared_bytes(tiles, fp8), FP8=int(fp8),
    )  # fmt: skip


def decode(
    q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, scale: float, most: int, fill: int = 0,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """The newest token of each of n sequences, of up to `most` splits: q [n, heads, 576], cache [blocks, block_size,
    576], out [n, heads, 512], contiguous. A sequence of length 0 gives zeros. fill: splits of a short sequence; as many
    as find a multiprocessor idle unless given. scales: of a cache in e4m3, [blocks, 1, 2, block_size], of latents and
    of the rope part; block_size is a multiple of 16 then.

    What comes before on the stream may still run, and write q and the newest tokens: all else that is read must be
    what the kernels before that one wrote. Where nothing shows that for lengths and tables, the kernel starts when all
    before it has ended.
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
    tiles = choose_tiles(q.device, fp8)
    shared = shared_bytes(tiles, fp8)
    kernel = jit.kernel("mla_decode", "mla_decode", q.dtype, shared, **sizes(heads, size, tiles, fp8))
    latents: Tensor | jit.TensorMap = cache
    if tiles.header == "mla_tma":
        latents = jit.tensor_map(cache.data_ptr(), len(cache) * size, WIDTH // 2, PANEL, WIDTH // 2)
    kernel(
        (blocks, most, 1), THREADS, q, latents, lengths if scales is None else scales, tables, lengths, out, splits,
        arrived, q.stride(0), tables.stride(0), fill, scale * LOG2_E, shared=shared,
        overlap=jit.settled(tables, lengths),
    )  # fmt: skip


CANDIDATE = Candidate(
    "mla_decode.cu", "GPUs from sm_80 on",
    f"latents of {LATENT} + {ROPE} elements of decoding rows of one token, from {LEAST_SEQUENCES} on, of chosen tokens "
    f"from {LEAST_SELECTED} on, f16 or bf16; of any number in e4m3, whose blocks are a multiple of {PANEL} tokens",
    supports, run,
)  # fmt: skip
