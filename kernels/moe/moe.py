"""Gated feed-forward layers of which each token visits a few, and the weighted sum of what they make.

The experts' matrices are stacked: w13 [E, 2 I, H] is gate over up, or [E, I, H] up alone where there is no gate; w2 is
[E, H, I]. A routed token is a token and one of its k experts; routed token p is of token p // k. On GPUs the router's
choice stays on the device: grids are as large as the worst case asks for, and what is not needed ends at once. A routed
token's weight scales what the first GEMM makes, so that the second one and the sum over a token's experts need it no
more.

Which kernels compute a layer follows from CANDIDATES, and so do the numbers of tokens that together use all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..activation.activation import activate
from ..device import DeviceCaps, device_caps
from ..gemm.linear import gated_linear, linear
from ..quantized.floats import Floats
from ..quantized.linear import dequantize
from ..quantized.stack import Stack
from . import expert_mlp, host_experts, plain_experts, quantized_experts
from .group import LocalExperts, local_ids

Matrices = Tensor | Floats | Stack  # [E, outputs, inputs]


class Biases(NamedTuple):
    """Biases of all experts, in the dtype of their matrices, contiguous."""

    up: Tensor | None = None  # [E, 2 I], gate over up
    down: Tensor | None = None  # [E, H]


UNBIASED = Biases()


class Inputs(NamedTuple):
    """Inputs of a layer's experts, for T tokens."""

    x: Tensor  # [T, H]
    ids: Tensor  # [T, k] int32: each token's experts, below E
    weights: Tensor  # [T, k] f32: theirs
    w13: Matrices  # [E, 2 I, H] of x's dtype, contiguous, or quantised
    w2: Matrices  # [E, H, I], likewise
    act: str = "silu"
    biases: Biases = UNBIASED  # added to what either matrix makes
    # Which experts w13 and w2 are, where they are not all; then ids are below local_experts.total
    local_experts: LocalExperts | None = None
    gated: bool = True  # else w13 is [E, I, H], and what is activated is multiplied with nothing

    @property
    def biased(self) -> bool:
        return self.biases.up is not None or self.biases.down is not None

    @property
    def routed(self) -> int:
        return self.ids.numel()

    @property
    def experts(self) -> int:
        """The number of experts that the router chooses from. A rank with some of them has about as large a share of
        the routed tokens, so that routed tokens per expert are of all."""
        return self.local_experts.total if self.local_experts else self.w13.shape[0]


class ExpertCandidate(NamedTuple):
    """A way to compute experts on GPUs, and of how many routed tokens it is the fastest. It declares what a Candidate
    does."""

    name: str
    devices: str
    weights: str
    # The function that computes these; None if the candidate does not take the weights, sizes or device.
    plan: Callable[[Inputs, DeviceCaps], Callable[[], Tensor] | None]
    above: int = 0  # routed tokens per expert: of so many or fewer another one is chosen
    most: float = math.inf  # routed tokens per expert: likewise of more
    few: int = 0  # most routed tokens of all experts, and half as many as there are experts; 0: any number
    borders: tuple[int, ...] = ()  # routed tokens per expert, of more than which it has other tiles
    sums: bool = False  # whether it makes each token's sum [T, H], not what each routed token makes [T * k, H]

    @property
    def takes(self) -> str:
        if self.few:
            return f"up to {self.few} routed tokens, and half as many as experts, of {self.weights}"
        above = f"more than {self.above} routed tokens per expert" if self.above else ""
        most = f"up to {self.most} {'of them' if above else 'routed tokens per expert'}" if self.most < math.inf else ""
        return ", ".join(filter(None, (above, most, self.weights)))

    def limit(self, experts: int) -> float:
        """Most routed tokens. Of fewer experts than twice the routed tokens, many routed tokens have one in common,
        whose weights other kernels read once."""
        return min(self.few, experts // 2) if self.few else self.most * experts

    def in_range(self, routed: int, experts: int) -> bool:
        return self.above * experts < routed <= self.limit(experts)

    def last_routed(self, experts: int) -> set[int]:
        """Numbers of routed tokens of which one more has another kernel, or other tiles."""
        bounds = {self.above * experts, self.limit(experts), *(one * experts for one in self.borders)}
        return {int(end) for end in bounds if end < math.inf}


Choose = Callable[[int, int, Stack, Stack, DeviceCaps], quantized_experts.Configs | None]


def _by_codes(choose: Choose, given: Inputs, caps: DeviceCaps) -> Callable[[], Tensor] | None:
    """Packed weights as they lie, by the kernels that `choose` chooses, of which None take them."""
    if not isinstance(given.w13, Stack) or not isinstance(given.w2, Stack):
        return None
    configs = choose(given.routed, given.experts, given.w13, given.w2, caps)
    return configs and partial(quantized_experts.experts, given, configs)


def _gemv_of_codes(formats: Sequence[str], given: Inputs, _: DeviceCaps) -> Callable[[], Tensor] | None:
    if not isinstance(given.w13, Stack) or not isinstance(given.w2, Stack):
        return None
    takes = quantized_experts.gemv_takes(given.w13, given.w2, given.ids.shape[1], formats)
    return partial(quantized_experts.gemv, given) if takes else None


def _gemv(gated: bool, given: Inputs, _: DeviceCaps) -> Callable[[], Tensor] | None:
    fits = given.gated == gated and not given.biased
    takes = fits and plain_experts.gemv_takes(given.x, given.ids, given.w13, given.w2)
    return partial(plain_experts.gemv, given) if takes else None


def _in_one_launch(given: Inputs, _: DeviceCaps) -> Callable[[], Tensor] | None:
    takes = not given.biased and expert_mlp.supports(given.x, given.w13, given.w2)
    return partial(expert_mlp.experts, given) if takes else None


def _by_wgmma(given: Inputs, caps: DeviceCaps) -> Callable[[], Tensor] | None:
    rows = plain_experts.wgmma_rows(given.routed, given.experts)
    return partial(plain_experts.by_wgmma, given, rows) if plain_experts.wgmma_takes(given, caps) else None


def _by_triton(given: Inputs, _: DeviceCaps) -> Callable[[], Tensor]:
    return partial(plain_experts.by_triton, given, plain_experts.tiling(given.routed, given.experts, given.x.dtype))


# Routed tokens per expert: of more, dequantising an expert first should be faster than multiplying codes, by an
# estimate that gives 93; wgmma_experts.cu takes more of plain experts, too.
PLAIN_ROUTED = 96
INT4, MXFP4 = "int4", "mxfp4"  # layouts' headers
# The first one that takes a layer and is in range computes it.
CANDIDATES = (
    # Formats that the GEMV reads faster than the pipeline. Of int4 8 and 16 routed tokens of Qwen3-30B-A3B take 17 and
    # 20 % less, of MXFP4 4 of gpt-oss-20b 7 % less, and 16 half as long again; of Q4_K 8 take 16 % more (H200,
    # 2026-11-27, benchmarks/ops_moe.py). Others were not timed.
    ExpertCandidate(
        "quantized_expert_gemv.cu", "GPUs", "4 bits with scales and zeros, or MXFP4",
        partial(_gemv_of_codes, (INT4, MXFP4)), few=4, sums=True,
    ),
    ExpertCandidate(
        "quantized_expert_gemv.cu", "GPUs", "4 bits with scales and zeros", partial(_gemv_of_codes, (INT4,)), few=16,
        sums=True,
    ),
    # The pipeline, which leaves x as it is, is as fast with few routed tokens.
    ExpertCandidate(
        "e4m3_experts.cu", "sm_90", "FP8 with a scale for 128 inputs or more",
        partial(_by_codes, quantized_experts.choose_e4m3), above=4, borders=(*quantized_experts.E4M3_TILES,)[:-1],
    ),
    # With 4 the pipeline takes 10 % less of int4 and 18 % less of Q4_K (Qwen3-30B-A3B); of 8 18 % more, 5 % more and,
    # of MXFP4 (gpt-oss-20b), 24 % more; 6 lies between (H200, 2026-11-27, benchmarks/ops_moe.py).
    ExpertCandidate(
        "quantized_wgmma_experts.cu", "sm_90", "other packed weights, inputs a multiple of 64",
        partial(_by_codes, quantized_experts.choose_wgmma), above=6, most=PLAIN_ROUTED,
        borders=(*quantized_experts.WGMMA_TILES,)[:-1],
    ),
    # More than 4 were not timed.
    ExpertCandidate(
        "quantized_pipeline.cu", "sm_90, sm_100", "packed weights, but for 8 bits with a scale for 32 inputs",
        partial(_by_codes, quantized_experts.choose_pipelined), most=8,
    ),
    ExpertCandidate(
        "quantized_experts.cu", "GPUs", "packed weights", partial(_by_codes, quantized_experts.choose_tiled),
        most=PLAIN_ROUTED, borders=(*quantized_experts.TILES,),
    ),
    # Without gates 24 routed tokens of Nemotron 3 Nano take 15 % less in one launch, 6 take 4 % more (H200, 2026-11-30,
    # benchmarks/ops_moe.py).
    ExpertCandidate(
        "expert_gemv.cu", "GPUs", "f16 or bf16 with gates, without biases", partial(_gemv, True), few=64, sums=True
    ),
    ExpertCandidate(
        "expert_gemv.cu", "GPUs", "f16 or bf16 without gates and biases", partial(_gemv, False), few=16, sums=True
    ),
    ExpertCandidate(
        "expert_mlp.cu", "sm_90, sm_100", "f16 or bf16 without biases, sizes multiples of 8",
        _in_one_launch, most=max(expert_mlp.TILES), borders=(*expert_mlp.TILES,),
    ),
    ExpertCandidate(
        "wgmma_experts.cu", "sm_90", "f16 or bf16, or packed weights that become so, sizes multiples of 8", _by_wgmma,
        above=PLAIN_ROUTED, borders=(*plain_experts.WGMMA_ROWS,)[:-1],
    ),
    ExpertCandidate("moe_triton.py", "GPUs", "all else", _by_triton, borders=(*plain_experts.TILINGS,)[:-1]),
)  # fmt: skip


def choose(given: Inputs) -> tuple[ExpertCandidate, Callable[[], Tensor]]:
    """Which candidate computes these on their GPU, where weights are packed for it or plain, and how."""
    found = device_caps(given.x.device)
    planned = ((one, one.plan(given, found)) for one in CANDIDATES if one.in_range(given.routed, given.experts))
    return next((one, run) for one, run in planned if run)


def warm_up_rows(experts: int, k: int) -> list[int]:
    """Numbers of tokens that together use every kernel, so that nothing has to be compiled while a request waits."""
    last = {routed for one in CANDIDATES for routed in one.last_routed(experts)}
    return sorted({routed // k + 1 for routed in last})


def fused_experts(given: Inputs) -> Tensor:
    """The sum over j of weights[t, j] * w2[e] (act(w13's gate[e] x[t]) * w13's up[e] x[t]), e = ids[t, j]: [T, H].
    Where some experts are held, e = ids[t, j] - local_experts.first, and the sum is over j with 0 <= e < E."""
    return summed(expert_terms(given), given.ids)


def expert_terms(given: Inputs) -> Tensor:
    """[T, n, H], whose sum over n is what `fused_experts` makes of the same: n is k where kernels leave each token's
    routed tokens apart, for whoever adds them to something else, or 1."""
    if not given.x.is_cuda:
        return on_cpu(given).unsqueeze(1)
    x, ids, weights = (one.contiguous() for one in given[:3])
    given = given._replace(x=x, ids=ids, weights=weights)
    if len(x) == 0:
        return torch.empty_like(x).unsqueeze(1)
    if not given.gated or not quantized_experts.takes(x, given.w13, given.w2):  # kernels of codes take gates alone
        given = given._replace(w13=plain(given.w13, x.dtype), w2=plain(given.w2, x.dtype))
    one, run = choose(given)
    return run().unsqueeze(1) if one.sums else apart(run(), ids, given.local_experts)


def apart(routed: Tensor, ids: Tensor, local_experts: LocalExperts | None) -> Tensor:
    """Routed tokens [T * k, H] as terms [T, k, H]; where some are not held, and so undefined, as one [T, 1, H]."""
    return (
        combine(routed, ids, local_experts).unsqueeze(1) if local_experts else routed.view(*ids.shape, routed.shape[1])
    )


def summed(terms: Tensor, ids: Tensor) -> Tensor:
    """[T, H] of `expert_terms`."""
    return terms.squeeze(1) if terms.shape[1] == 1 else combine(terms.flatten(0, 1), ids)


def combine(routed: Tensor, ids: Tensor, local_experts: LocalExperts | None = None) -> Tensor:
    """[T, H]: the sums of each token's rows, of [T * n, H]; of routed tokens alone whose experts are held."""
    from . import moe_triton

    return moe_triton.combine(routed, ids, local_experts.ids if local_experts else None)


def of_expert(stack: Tensor | None, expert: int) -> Tensor | None:
    return None if stack is None else stack[expert]


def matrix(stack: Matrices, expert: int, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] of one expert."""
    if isinstance(stack, Stack):
        return stack.expert(expert, dtype)
    if isinstance(stack, Floats):
        return dequantize(stack.expert(expert), dtype)
    return stack[expert].to(dtype)


def plain(stack: Matrices, dtype: torch.dtype) -> Tensor:
    """All weights, dequantised."""
    return stack if isinstance(stack, Tensor) else stack.plain(dtype)


def on_cpu(given: Inputs) -> Tensor:
    """In one call where there are kernels for it; else expert by expert, each with all of its tokens."""
    x, ids, weights, w13, w2, act, biases, local_experts, gated = given
    if host_experts.supports(x, ids, w13, w2):
        return host_experts.experts(given._replace(ids=ids.contiguous(), weights=weights.contiguous()))
    k, experts = ids.shape[1], w13.shape[0]
    local = local_ids(ids, experts, local_experts)
    sorted_ids = local.argsort(stable=True)
    counts = torch.bincount(local, minlength=experts + 1).tolist()
    y = torch.zeros(x.shape, dtype=torch.float32)
    for e, routed in enumerate(sorted_ids.split(counts)[:-1]):
        if len(routed):
            tokens = routed // k
            of_up = matrix(w13, e, x.dtype), of_expert(biases.up, e)
            if gated:
                inner = gated_linear(x[tokens], of_up[0], act, of_up[1])
            else:
                inner = activate(linear(x[tokens], *of_up), act)
            made = linear(inner, matrix(w2, e, x.dtype), of_expert(biases.down, e))
            y.index_add_(0, tokens, made * weights.flatten()[routed, None])
    return y.to(x.dtype)
