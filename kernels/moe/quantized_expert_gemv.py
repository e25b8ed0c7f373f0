"""The quantised experts of one to a few tokens: two kernels that read weights pair by pair."""

from __future__ import annotations

from torch import Tensor

from .. import jit
from ..quantized import int4_cuda, mxfp4_cuda
from ..quantized.pieces_cuda import STRIP
from ..quantized.quantized_gemv import LARGE
from ..quantized.stack import Stack
from . import quantized_pipeline
from .group import Held

# Formats that it reads faster than quantized_pipeline.cu → most pairs. Of int4 8 and 16 pairs of Qwen3-30B-A3B take 17
# and 20 % less, of MXFP4 4 of gpt-oss-20b 7 % less, and 16 half as long again; of Q4_K 8 take 16 % more (H200,
# 2026-11-27, benchmarks/ops_moe.py). Others were not timed.
MOST_PAIRS = {int4_cuda.HEADER: 16, mxfp4_cuda.HEADER: 4}
# Experts to a pair, at least: of fewer, many pairs have one in common, whose weights other kernels read once.
SHARE = 2
WARPS = 8  # of a block
MOST_SHARED = 96 << 10  # bytes of x in a block's shared memory: two blocks fit on a multiprocessor of sm_90


def takes(pairs: int, experts: int, top: int, w13: Stack, w2: Stack) -> bool:
    """Whether so many pairs of all experts, `top` of a token, are few and these are stacks for it, of which
    `quantized_cuda.supports` says that they are in pieces."""
    most = min(MOST_PAIRS.get(one.packed.layout.header, 0) for one in (w13, w2))
    room = max(w13.shape[2], top * w2.shape[2]) * 2 <= MOST_SHARED
    return pairs <= min(most, experts // SHARE) and top <= 32 and room


def most_tokens(experts: int, k: int) -> list[int]:
    """Of each format."""
    return [min(most, experts // SHARE) // k for most in sorted(MOST_PAIRS.values())]


def sizes(stack: Stack, act: str, top: int, bias: bool, part: bool) -> dict[str, jit.Size]:
    """What quantized_expert_gemv.cu is compiled for. act: of the gate; "": there is none. part: experts are shared
    out."""
    layout = stack.packed.layout
    pieces = stack.shape[2] // layout.inputs * (1 if act else top)
    most = (4 if act else 6) // (2 if layout.bytes > LARGE else 1)
    ahead = min(most, -(-pieces // WARPS))
    of = quantized_pipeline.sizes_of_gemm(stack, act, top, bias)
    return of | dict(WARPS=WARPS, AHEAD=ahead, PART=int(part))


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Stack, w2: Stack, act: str, up: Tensor | None, down: Tensor | None,
    held: Held | None,
) -> Tensor:  # fmt: skip
    """[T, H], the weighted sums over each token's experts, of x [T, H], ids [T, k] int32 and weights [T, k] f32. up
    [E, 2 I] and down [E, H]: biases. held: which experts w13 and w2 are, where they are not all."""
    (tokens, hidden), k = x.shape, ids.shape[1]
    h, y = x.new_empty(tokens * k, w2.shape[2]), x.new_empty(tokens, hidden)
    here = (held.first, held.size) if held else (0, 0)
    for stack, given, bias, made, of in ((w13, x, up, h, act), (w2, h, down, y, "")):
        consts = sizes(stack, of, k, bias is not None, held is not None)
        shared = stack.shape[2] * (1 if of else k) * 2
        kernel = jit.kernel("quantized_expert_gemv", "quantized_expert_gemv", x.dtype, shared, **consts)
        args = given, stack.packed.pieces, given if bias is None else bias, ids, weights, made, *here
        kernel((len(made), -(-made.shape[1] // STRIP), 1), WARPS * 32, *args, shared=shared)
    return y
