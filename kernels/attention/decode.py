"""The kernel decode.cu: one token of each sequence over a cache whose blocks TMA brings."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..candidate import Candidate
from ..device import HALF_SHARED, current_stream, device_caps
from ..rope.fp8_cache import E4M3
from ..rope.rope import CurrentKV
from .backend import LOG2_E, Part
from .kv_boxes import DIMS, boxed, tensor_maps

SEQUENCES = 512  # at most: a block counts what is read of each
LEAST = 4  # tiles that are worth a block of their own, and adding its result to the others'
RUN_BYTES = 128  # of a token, that lie together in shared memory, or a half or quarter of them
FEW_BYTES = 1024  # about what of a sequence's last box, which is half empty on average, is fetched at a time


def supports(part: Part) -> bool:
    if not part.decodes or part.rows.query_len > 1 or part.values.shape != part.keys.shape:
        return False
    return supports_decode(part.stop, part.q, part.keys, part.current_kv, part.scales)


def run(part: Part) -> None:
    rows = part.rows
    decode(
        part.stop, part.q, part.keys, part.values, rows.block_tables, rows.lengths, part.out, *part.params,
        part.current_kv, part.scales,
    )  # fmt: skip


def supports_decode(
    n: int, q: Tensor, keys: Tensor, current_kv: CurrentKV | None = None, scales: Tensor | None = None
) -> bool:
    """Whether `decode` takes n sequences, whose rows of q [T, heads, dim] are the first ones, and caches like keys
    [blocks, size, kv_heads, dim], with scales if they are e4m3."""
    if n > SEQUENCES or not boxed(q, keys, q.dtype if scales is None else E4M3):
        return False
    if scales is not None and (q.shape[2] % 32 or decode_tile(q.shape[2]) % keys.shape[1]):
        return False
    if current_kv is None:
        return True
    norms = current_kv.norms
    narrow = norms is None or norms[0].dtype == norms[1].dtype == q.dtype
    return narrow and current_kv.cos_sin.cos.dtype == torch.float32


def decode(
    n: int, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, scale: float,
    window: int, softcap: float, sinks: Tensor | None, current_kv: CurrentKV | None = None,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """The newest token of each of n sequences, as attention_triton.decode: the first rows of q and out [T, heads,
    head_dim], out contiguous.

    With `current_kv`, q is neither normed nor rotated yet, and the caches do not hold these tokens yet. What has made
    q, k and v, a GEMM, may still run: all else that is read must be what the kernels before that one wrote. Where
    nothing shows that for lengths and tables, the kernel starts when all before it has ended.
    """
    (_, heads, dim), (_, size, kv_heads, _), device = q.shape, keys.shape, q.device
    # Stand-ins for arguments that a kernel of rotated tokens does not touch.
    k, v, (cos, sin, *_), norms, slots = current_kv or (q, q, (q, q), None, lengths)
    q_weight, k_weight, eps = norms or (q, q, 0.0)
    kernel, threads, shared, boxes = _made(
        device, q.dtype, heads, kv_heads, dim, size, window, current_kv is not None, norms is not None, softcap > 0,
        sinks is not None, scales is not None,
    )  # fmt: skip
    grid, stream = max(2 * device_caps(device).num_sms, kv_heads), current_stream()
    parts, sums = _parts(device, stream, grid, heads // kv_heads, dim)
    kernel(
        (grid, 1, 1), threads, *tensor_maps(keys, values, *boxes), q, k, v, cos, sin, q_weight, k_weight, slots, keys,
        values, sums if scales is None else scales, tables, lengths, out, parts, sums, jit.counters(device, stream),
        sums if sinks is None else sinks, n, q.stride(0), k.stride(0), v.stride(0), tables.stride(0), scale * LOG2_E,
        float(eps), float(softcap), shared=shared, overlap=current_kv is None or jit.settled(tables, lengths),
    )  # fmt: skip


class _Made(NamedTuple):
    """A program, and how it is launched."""

    kernel: jit.Kernel
    threads: int
    shared: int  # bytes of shared memory
    boxes: tuple[tuple[int, int], int, int]  # as tensor_maps takes them


@functools.cache
def _made(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, size: int, window: int,
    rotate: bool, norm: bool, capped: bool, sinks: bool, fp8: bool,
) -> _Made:  # fmt: skip
    """Kept, as each layer of each step asks for it. device: the current one."""
    tile, wide = decode_tile(dim), 1 if fp8 else 2
    box, (run, few) = math.gcd(size, tile), decode_runs(dim * wide)
    few = min(box, few)
    stages, shared = smem_plan(heads // kv_heads, dim, wide)
    kernel = jit.kernel(
        "decode", "decode", dtype, shared, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, SIZE=size, BOX=box, FEW=few,
        TILE=tile, STAGES=stages, LEAST=LEAST, SEQUENCES=SEQUENCES, SMEM_BYTES=shared, ROTATE=int(rotate),
        NORM=int(norm), WINDOW=window, SOFTCAP=int(capped), SINKS=int(sinks), FP8=int(fp8),
    )  # fmt: skip
    return _Made(kernel, (tile // 16 + 2) * 32, shared, ((box, few), dim * wide // run, run // 2))


@functools.cache
def _parts(device: torch.device, stream: int, grid: int, group: int, dim: int) -> tuple[Tensor, Tensor]:
    """Partial results of sequences in several parts, which blocks leave for each other: means [grid, 2, group, dim]
    f32, and sums behind them.

    Of one stream, as jit.counters: its kernels use them one after the other. Graphs keep their address, so they stay;
    where a capture is the first to ask, they are of its graphs' memory, which nothing else uses while they are.
    """
    parts = torch.empty(grid * 2 * group * (dim + 1), dtype=torch.float32, device=device)
    return parts, parts[grid * 2 * group * dim :]


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


def smem_plan(group: int, dim: int, wide: int = 2) -> tuple[int, int]:
    """Tiles that a block holds at once, and all bytes of its shared memory, as decode.cu lays it out. wide: bytes of an
    element; of one, there are scales."""
    rows, warps = 16 if group > 8 else 8, decode_tile(dim) // 16
    heads = rows * (dim + 8) * 2 + dim * 2 + 80
    rest = 1024 + warps * group * (dim + 2) * 4 + 2 * heads + SEQUENCES * 4
    tile = 2 * decode_tile(dim) * (dim * wide + (wide == 1))
    stages = min(6, (HALF_SHARED - rest) // tile)
    return stages, rest + stages * tile


CANDIDATE = Candidate(
    "decode.cu", "sm_90, sm_100",
    f"decoding rows of one token, up to {SEQUENCES}; heads of {DIMS[0]} to {DIMS[-1]} elements, a multiple of "
    f"{DIMS.step}; f16 or bf16, caches of the same or of e4m3",
    supports, run,
)  # fmt: skip
