"""The quantised experts of one to a few tokens: two kernels that read weights pair by pair."""

from __future__ import annotations

from torch import Tensor

from .. import jit
from ..quantized.pieces_cuda import LARGE, STRIP
from ..quantized.stack import Stack
from . import quantized_pipeline
from .group import Held

# Most pairs, also by experts: of more, many have one in common, and its weights are read and widened once for them.
MOST_PAIRS = 16
SHARE = 2
WARPS = 8  # of a block
MOST_SHARED = 96 << 10  # bytes of x in a block's shared memory: two fit on a multiprocessor


def most_pairs(experts: int) -> int:
    return min(MOST_PAIRS, experts // SHARE)


def supports(ids: Tensor, w13: Stack, w2: Stack) -> bool:
    """Whether `experts` takes these, of which `quantized_cuda.supports` says that they are in pieces. ids [T, k]."""
    k, inputs = ids.shape[1], (w13.shape[2], ids.shape[1] * w2.shape[2])
    return k <= 32 and w2.shape[2] % STRIP == 0 and max(inputs) * 2 <= MOST_SHARED


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
