"""Gated feed-forward layers of which each token visits a few, and the weighted sum of what they make.

The experts' matrices are stacked: w13 [E, 2 I, H] is gate over up, w2 [E, H, I]. A pair is a token and one of its k
experts; pair p is of token p // k. On GPUs the router's choice stays on the device: grids are as large as the worst
case asks for, and what is not needed ends at once. A pair's weight scales what the first GEMM makes, so that the second
one and the sum over a token's experts need it no more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..activation.activation import ACTIVATIONS
from ..device import device_caps
from ..gemm.linear import gated_linear, linear
from ..quantized import floats
from ..quantized.floats import Floats
from ..quantized.stack import Stack
from . import (
    dequantized,
    e4m3_experts,
    expert_gemm,
    expert_gemv,
    expert_mlp,
    experts_cpu,
    gather_pairs,
    quantized_cuda,
    quantized_expert_gemv,
    quantized_experts,
    quantized_wgmma_experts,
    wgmma_experts,
)
from .expert_gemm import ItemConfig
from .expert_mlp import SharedExperts
from .group import Held, group, local_experts


class TileConfig(NamedTuple):
    """The tiles of a grouped GEMM."""

    rows: int  # pairs of one expert
    outputs: int  # of w13: so many of gate and as many of up
    inputs: int  # of a step
    warps: int
    stages: int


class Tiling(NamedTuple):
    """Both GEMMs; their tiles have the same rows."""

    up: TileConfig
    down: TileConfig


# Most pairs per expert → tiles.
TILINGS = {
    8: Tiling(TileConfig(16, 64, 128, 4, 3), TileConfig(16, 128, 128, 4, 3)),
    32: Tiling(TileConfig(32, 64, 128, 4, 3), TileConfig(32, 128, 128, 4, 3)),
    96: Tiling(TileConfig(64, 64, 64, 4, 3), TileConfig(64, 128, 64, 4, 3)),
    1 << 30: Tiling(TileConfig(128, 128, 64, 8, 3), TileConfig(128, 256, 64, 8, 3)),
}
F32_TILING = Tiling(TileConfig(16, 32, 32, 4, 2), TileConfig(16, 32, 32, 4, 2))


Plain = Tensor | Floats
Matrices = Plain | Stack  # [E, outputs, inputs]


class Biases(NamedTuple):
    """Of all experts, in the dtype of their matrices, contiguous."""

    up: Tensor | None = None  # [E, 2 I], gate over up
    down: Tensor | None = None  # [E, H]


UNBIASED = Biases()


class Inputs(NamedTuple):
    """Of a layer's experts, for T tokens."""

    x: Tensor  # [T, H]
    ids: Tensor  # [T, k] int32: each token's experts, below E
    weights: Tensor  # [T, k] f32: theirs
    w13: Matrices  # [E, 2 I, H] of x's dtype, contiguous, or quantised
    w2: Matrices  # [E, H, I], likewise
    act: str = "silu"
    biases: Biases = UNBIASED  # added to what either matrix makes
    held: Held | None = None  # which experts w13 and w2 are, where they are not all; then ids are below held.total

    @property
    def pairs(self) -> int:
        return self.ids.numel()

    @property
    def experts(self) -> int:
        """That the router chooses from. A rank with some of them has about as large a share of the pairs, so that
        pairs per expert are of all."""
        return self.held.total if self.held else self.w13.shape[0]


def fused_experts(given: Inputs) -> Tensor:
    """The sum over j of weights[t, j] * w2[e] (act(w13's gate[e] x[t]) * w13's up[e] x[t]), e = ids[t, j]: [T, H].
    Where some experts are held, e = ids[t, j] - held.first, and the sum is over j with 0 <= e < E."""
    return summed(expert_terms(given), given.ids)


def expert_terms(given: Inputs) -> Tensor:
    """[T, n, H], whose sum over n is what `fused_experts` makes of the same: n is k where kernels leave each token's
    pairs apart, for whoever adds them to something else, or 1."""
    if not given.x.is_cuda:
        return on_cpu(given).unsqueeze(1)
    x, ids, weights = (one.contiguous() for one in given[:3])
    given = given._replace(x=x, ids=ids, weights=weights)
    w13, w2, held = given.w13, given.w2, given.held
    if len(x) == 0:
        return torch.empty_like(x).unsqueeze(1)
    if quantized_cuda.supports(x, w13, w2):
        assert isinstance(w13, Stack) and isinstance(w2, Stack), "`supports` says so"
        if quantized_expert_gemv.takes(given.pairs, given.experts, ids.shape[1], w13, w2):
            return quantized_expert_gemv.experts(x, ids, weights, w13, w2, given.act, *given.biases, held).unsqueeze(1)
        codes = quantized_cuda.multiplies_codes(given.pairs, given.experts, w13, w2, device_caps(x.device))
        return apart((in_pieces if codes else grouped)(given), ids, held)
    w13, w2 = plain(w13, x.dtype), plain(w2, x.dtype)
    given = given._replace(w13=w13, w2=w2)
    if isinstance(w13, Floats) or isinstance(w2, Floats) or any(bias is not None for bias in given.biases):
        return apart(grouped(given), ids, held)
    if given.pairs <= expert_gemv.most_pairs(given.experts) and expert_gemv.supports(x, ids, w13, w2):
        return expert_gemv.experts(given).unsqueeze(1)
    if given.pairs <= expert_mlp.MOST_PAIRS * given.experts and expert_mlp.supports(x, w13, w2):
        return apart(in_one_launch(given), ids, held)
    if given.pairs <= expert_gemm.most_pairs(w2) * given.experts and expert_gemm.supports(x, w13, w2):
        return apart(pipelined(given), ids, held)
    return apart(grouped(given), ids, held)


def takes_shared(x: Tensor, k: int, w13: Matrices, w2: Matrices, shared: SharedExperts) -> bool:
    """Whether `terms_with_shared` takes x [T, H] and all experts of a layer, which have no biases, and is faster than
    `expert_terms` and these shared experts apart."""
    if not x.is_cuda or not isinstance(w13, Tensor) or not isinstance(w2, Tensor):
        return False
    pairs, experts = len(x) * k, len(w13)
    few = expert_gemv.most_pairs(experts) < pairs <= expert_mlp.MOST_PAIRS * experts
    return few and expert_mlp.supports(x, w13, w2) and expert_mlp.supports_shared(x, w2, shared)


def terms_with_shared(given: Inputs, shared: SharedExperts) -> Tensor:
    """`expert_terms`, and behind each token's what experts make that all tokens visit: [T, k + 1, H]."""
    x, ids, weights = (one.contiguous() for one in given[:3])
    y = in_one_launch(given._replace(x=x, ids=ids, weights=weights), shared=shared)
    return y.view(len(x), ids.shape[1] + 1, x.shape[1])


def apart(pairs: Tensor, ids: Tensor, held: Held | None) -> Tensor:
    """Pairs [T * k, H] as terms [T, k, H]; where some are not held, and so undefined, as one [T, 1, H]."""
    return combine(pairs, ids, held).unsqueeze(1) if held else pairs.view(*ids.shape, pairs.shape[1])


def summed(terms: Tensor, ids: Tensor) -> Tensor:
    """[T, H] of `expert_terms` or `terms_with_shared`."""
    return terms.squeeze(1) if terms.shape[1] == 1 else combine(terms.flatten(0, 1), ids)


def combine(pairs: Tensor, ids: Tensor, held: Held | None = None) -> Tensor:
    """[T, H]: the sums of each token's rows, of [T * n, H]; of pairs alone whose experts are held."""
    from . import moe_triton

    return moe_triton.combine(pairs, ids, held.ids if held else None)


def fused_experts_reference(given: Inputs) -> Tensor:
    """Expert by expert, in f32 on the CPU, of plain weights."""
    x, ids, weights, w13, w2, act, biases, held = given
    rows, chosen, by = x.float().cpu(), ids.cpu(), weights.float().cpu()
    up, down = (None if bias is None else bias.float().cpu() for bias in biases)
    y = torch.zeros(x.shape, dtype=torch.float32)
    first = held.first if held else 0
    for e in range(w13.shape[0]):
        tokens, places = (chosen == first + e).nonzero(as_tuple=True)
        if len(tokens):
            one, two = (matrix(w, e, x.dtype).float().cpu() for w in (w13, w2))
            inner = gated_linear(rows[tokens], one, act, of_expert(up, e))
            made = linear(inner, two, of_expert(down, e))
            y.index_add_(0, tokens, made * by[tokens, places, None])
    return y.to(x)


def of_expert(stack: Tensor | None, expert: int) -> Tensor | None:
    return None if stack is None else stack[expert]


def matrix(stack: Matrices, expert: int, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] of one expert."""
    if isinstance(stack, Stack):
        return stack.expert(expert, dtype)
    return floats.dequantize(stack.expert(expert), dtype) if isinstance(stack, Floats) else stack[expert].to(dtype)


def plain(stack: Matrices, dtype: torch.dtype) -> Plain:
    """Without a stack's packed form: dequantised."""
    return stack.plain(dtype) if isinstance(stack, Stack) else stack


def on_cpu(given: Inputs) -> Tensor:
    """In one call where there are kernels for it; else expert by expert, each with all of its tokens."""
    x, ids, weights, w13, w2, act, biases, held = given
    if experts_cpu.supports(x, ids, w13, w2):
        return experts_cpu.experts(given._replace(ids=ids.contiguous(), weights=weights.contiguous()))
    k, experts = ids.shape[1], w13.shape[0]
    local = local_experts(ids, experts, held)
    order = local.argsort(stable=True)
    counts = torch.bincount(local, minlength=experts + 1).tolist()
    y = torch.zeros(x.shape, dtype=torch.float32)
    for e, pairs in enumerate(order.split(counts)[:-1]):
        if len(pairs):
            tokens = pairs // k
            inner = gated_linear(x[tokens], matrix(w13, e, x.dtype), act, of_expert(biases.up, e))
            made = linear(inner, matrix(w2, e, x.dtype), of_expert(biases.down, e))
            y.index_add_(0, tokens, made * weights.flatten()[pairs, None])
    return y.to(x.dtype)


def tiling(pairs: int, experts: int, dtype: torch.dtype) -> Tiling:
    """The fastest of so many pairs."""
    if dtype == torch.float32:
        return F32_TILING
    return next(tiles for most, tiles in TILINGS.items() if pairs <= most * experts)


def tiling_rows(experts: int, k: int) -> list[int]:
    """Numbers of tokens that together use every kernel, so that nothing has to be compiled while a request waits."""
    borders = {*list(TILINGS)[:-1], expert_gemm.MOST_PAIRS, expert_gemm.MOST_PAIRS_OF_LARGE, *expert_mlp.TILES}
    borders |= {e4m3_experts.MOST_OF_16_BITS, *list(e4m3_experts.TILES)[:-1], *list(wgmma_experts.ROWS)[:-1]}
    borders |= {*quantized_experts.TILES, quantized_cuda.PIPELINE_PAIRS, dequantized.LEAST_PAIRS}
    borders |= {quantized_wgmma_experts.LEAST_PAIRS, *list(quantized_wgmma_experts.TILES)[:-1]}
    pairs = expert_gemv.most_pairs(experts), expert_mlp.SORTED_PAIRS
    last = *quantized_expert_gemv.most_tokens(experts, k), *(most // k for most in pairs)
    few = [1, *(most + 1 for most in last), expert_mlp.MOST_SHARED_ROWS + 1]
    return few + [most * experts // k + 1 for most in sorted(borders)]


def pipelined(given: Inputs, outputs: tuple[int, int] | None = None) -> Tensor:
    """[T * k, H], each token's pairs apart: grouped GEMMs of few pairs per expert, where `expert_gemm` takes them.
    outputs: of an item of both GEMMs; chosen unless given."""
    x, ids, weights, w13, w2, act, _, held = given
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor), "`supports` was not asked"
    outputs = outputs or expert_gemm.item_outputs(w2, device_caps(x.device).num_sms)
    groups = group(ids, len(w13), expert_gemm.ROWS, held)
    h = expert_gemm.expert_up(x, ids, weights, w13, groups, act, ItemConfig(outputs[0]))
    return expert_gemm.expert_down(h, w2, groups, ItemConfig(outputs[1]))


def in_one_launch(given: Inputs, tiles: int = 0, shared: SharedExperts | None = None) -> Tensor:
    """`pipelined` by one kernel, where `expert_mlp` takes it. tiles: of 8 rows; chosen unless given. shared: as
    `expert_mlp` has them."""
    x, ids, weights, w13, w2, act, _, held = given
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor), "`supports` was not asked"
    tiles = tiles or expert_mlp.choose_tiles(given.pairs, given.experts)
    blocks_sort = held is None and expert_mlp.blocks_sort(given.pairs, len(w13))
    groups = None if blocks_sort else group(ids, len(w13), 8 * tiles, held)
    return expert_mlp.expert_mlp(x, ids, weights, w13, w2, groups, act, tiles, shared)


def in_pieces(given: Inputs, configs: quantized_cuda.KernelConfigs | None = None) -> Tensor:
    """`pipelined` of quantised weights, where `quantized_cuda` takes them. configs: chosen unless given."""
    x, ids, weights, w13, w2, act, biases, held = given
    assert isinstance(w13, Stack) and isinstance(w2, Stack), "`supports` was not asked"
    configs = configs or quantized_cuda.choose_kernels(given.pairs, given.experts, w13, w2, device_caps(x.device))
    groups = group(ids, w13.shape[0], configs.rows, held)
    h = quantized_cuda.expert_up(x, weights, w13, groups, ids.shape[1], act, configs.up, biases.up)
    return quantized_cuda.expert_down(h, weights, w2, groups, configs.down, biases.down)


def grouped(given: Inputs) -> Tensor:
    """`pipelined` of any number of pairs; what is packed becomes plain some experts at a time."""
    if wgmma_experts.takes(given.x, given.w13, given.w2, given.pairs, given.experts):
        return by_wgmma(given, wgmma_experts.choose_rows(given.pairs, given.experts))
    return by_triton(given, tiling(given.pairs, given.experts, given.x.dtype))


def by_wgmma(given: Inputs, rows: int) -> Tensor:
    """`grouped`, where `wgmma_experts` takes it. rows: pairs of a tile."""
    x, ids, weights, w13, w2, act, biases, held = given
    groups = group(ids, w13.shape[0], rows, held)
    gathered = gather_pairs.gather(x, groups, ids.shape[1], rows)
    h, y = x.new_empty(len(gathered), w13.shape[1] // 2), x.new_empty(ids.numel(), w2.shape[1])
    dequantized.by_parts(
        w13, groups, biases.up, x.dtype,
        lambda some, mine, bias: wgmma_experts.multiply(gathered, some, mine, weights, bias, h, act, rows),
    )  # fmt: skip
    dequantized.by_parts(
        w2, groups, biases.down, x.dtype,
        lambda some, mine, bias: wgmma_experts.multiply(h, some, mine, weights, bias, y, "", rows),
    )  # fmt: skip
    return y


def by_triton(given: Inputs, tiles: Tiling) -> Tensor:
    """`grouped`, whatever the sizes and the GPU."""
    from . import moe_triton

    x, ids, weights, w13, w2, act, biases, held = given
    groups = group(ids, w13.shape[0], tiles.up.rows, held)
    number, dtype = ACTIVATIONS.index(act), x.dtype
    h, y = x.new_empty(ids.numel(), w13.shape[1] // 2), x.new_empty(ids.numel(), w2.shape[1])
    dequantized.by_parts(
        w13, groups, biases.up, dtype,
        lambda some, mine, bias: moe_triton.expert_up(x, ids, weights, some, mine, number, tiles.up, bias, h),
    )  # fmt: skip
    dequantized.by_parts(
        w2, groups, biases.down, dtype,
        lambda some, mine, bias: moe_triton.expert_down(h, some, mine, tiles.down, weights, bias, y),
    )  # fmt: skip
    return y
