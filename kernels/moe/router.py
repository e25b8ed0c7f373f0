"""A router: which experts each token goes to, and with which weights. Computed in f32, whatever the model's dtype.

Scores are a softmax over all experts (Shazeer et al. 2017, arXiv 1701.06538; Mixtral, arXiv 2401.04088) or sigmoids
with a bias that is for the choice alone (DeepSeek-V3, arXiv 2412.19437), or roots of softplus in their place
(DeepSeek-V4: DeepSeek-AI 2026), for which there are no kernels. With groups, experts are chosen from the best
groups alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .. import jit
from ..candidate import Candidate, choose
from ..cpp import ops
from ..device import current_stream

ROUTE_ROWS = 256  # tokens; of more, a GEMM of its own is faster
CPU_ROWS = 64  # tokens; of more, torch's GEMM is faster
ROUTE_EXPERTS = 1024  # that the kernels have room for
TILE = 8  # tokens of a block, of which tensor cores multiply 16 experts' rows
WARPS = 8  # of a block
# Warps of a block of TILE tokens: each asks at once for all that it needs of 2048 inputs. 26 layers of DeepSeek-V2-Lite
# take 107 us at 16 tokens instead of 189, and 122 instead of 166 at 64 (H200, 2026-11-25, `benchmarks/offline.py
# --config deepseek-v2-lite --parts ap`).
TILE_WARPS = 16
SCORINGS = ("softmax", "sigmoid")  # of kernels, in the order of router.cu; "sqrtsoftplus" is torch's


class RouterParams(NamedTuple):
    """How a model chooses and weighs experts."""

    top_k: int
    scoring: str = "softmax"
    corrected: bool = False  # a bias is added to the scores, for the choice alone
    normalise: bool = True  # the weights of a token's experts add up to 1
    scale: float = 1.0  # a factor on the weights
    groups: int = 1
    top_groups: int = 1  # groups that experts are chosen from
    group_top: int = 2  # a group is as good as its best experts together, so many
    biased: bool = False  # a bias is added to softmax's logits


def route(x: Tensor, weight: Tensor, bias: Tensor | None, params: RouterParams) -> tuple[Tensor, Tensor]:
    """x [T, H], weight [E, H] and bias [E] f32 → ids [T, k] int32 and weights [T, k] f32 of each token's experts.

    bias: where params.corrected, or params.biased. Ids are valid whatever x holds, NaN too.
    """
    found = choose(CANDIDATES, x, weight, bias, params)
    assert found is not None, "the last one takes all"
    return found.run(x, weight, bias, params)


def route_reference(x: Tensor, weight: Tensor, bias: Tensor | None, params: RouterParams) -> tuple[Tensor, Tensor]:
    scores = _scores(x, weight, bias, params)
    ranks = scores + bias if params.corrected and bias is not None else scores
    if params.groups > 1:
        grouped = ranks.unflatten(1, (params.groups, -1))
        best = grouped.topk(params.group_top, -1).values.sum(-1).topk(params.top_groups, -1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        ranks = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    ids = ranks.topk(params.top_k, -1).indices
    return ids.int(), _weights(scores, ids, params)


def weigh(x: Tensor, weight: Tensor, ids: Tensor, params: RouterParams) -> Tensor:
    """Weights [T, k] f32 of experts that are chosen already, ids [T, k]; the others as `route` has them."""
    return _weights(_scores(x, weight, None, params), ids, params)


def _scores(x: Tensor, weight: Tensor, bias: Tensor | None, params: RouterParams) -> Tensor:
    logits = x.float() @ weight.float().t()
    if params.biased and bias is not None:
        logits += bias
    if params.scoring == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if params.scoring == "sigmoid" else softplus(logits).sqrt()


def _weights(scores: Tensor, ids: Tensor, params: RouterParams) -> Tensor:
    chosen = scores.gather(1, ids)
    if params.normalise:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + (0 if params.scoring == "softmax" else 1e-20))
    return chosen * params.scale


def supports_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, params: RouterParams) -> bool:
    """Whether `route_cpu` takes this step and router."""
    rows = 0 < len(x) <= CPU_ROWS and x.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype
    return rows and len(weight) <= ROUTE_EXPERTS and params.scoring in SCORINGS and ops.takes(x)


def route_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, params: RouterParams) -> tuple[Tensor, Tensor]:
    """In C++."""
    rows, experts, top = len(x), len(weight), params.top_k
    logits = torch.empty(rows, experts, dtype=torch.float32)
    ids, weights = torch.empty(rows, top, dtype=torch.int32), torch.empty(rows, top, dtype=torch.float32)
    added, correction = bias if params.biased else None, bias if params.corrected else None
    choice = rows, experts, top, int(params.scoring == "sigmoid"), int(params.normalise)
    groups = params.groups, params.top_groups, params.group_top
    ops.run(
        (ops.typed("router", "logits", x.dtype), (x, weight, added, logits, rows, *weight.shape, x.stride(0))),
        (ops.op("router", "choose"), (logits, correction, ids, weights, *choice, *groups, float(params.scale))),
    )
    return ids, weights


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, params: RouterParams) -> bool:
    """Whether `route_cuda` takes this router."""
    experts, hidden = weight.shape
    sizes = experts <= ROUTE_EXPERTS and hidden % 8 == 0 and params.top_k <= min(32, experts)
    if params.scoring not in SCORINGS:
        return False
    if params.corrected and params.scoring == "softmax":  # the kernel ranks a softmax's experts by their logits
        return False
    return weight.is_cuda and weight.element_size() == 2 and sizes and supports_groups(params) and jit.plain(weight)


def supports_groups(params: RouterParams) -> bool:
    """Whether router.cu chooses among them. It ranks a softmax's experts by their logits, which are not to be added."""
    best = (1, 2) if params.scoring == "sigmoid" else (1,)
    return params.groups == 1 or (params.groups <= 32 and params.group_top in best)


def route_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, params: RouterParams) -> tuple[Tensor, Tensor]:
    """One kernel; of many tokens a GEMM and one more."""
    x = x.contiguous()
    rows, (experts, hidden) = len(x), weight.shape
    ids = torch.empty(rows, params.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(rows, params.top_k, dtype=torch.float32, device=x.device)
    few = rows <= ROUTE_ROWS
    if few:
        logits = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    else:
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)  # which rounding to x's dtype would spoil
    of_bias = logits if bias is None else bias
    if not few:
        kernel = jit.kernel("router", "choose", x.dtype, **sizes(1, experts, hidden, params, bias is not None))
        kernel((-(-rows // WARPS), 1, 1), WARPS * 32, logits, of_bias, ids, weights, rows, float(params.scale))
        return ids, weights
    together, grid = blocks(rows, experts)
    found = sizes(together, experts, hidden, params, bias is not None)
    kernel = jit.kernel("router", "route", x.dtype, **found)
    arrived = jit.counters(x.device, current_stream())
    kernel(grid, found["WARPS"] * 32, x, weight, of_bias, logits, ids, weights, arrived, rows, float(params.scale))
    return ids, weights


def blocks(rows: int, experts: int) -> tuple[int, tuple[int, int, int]]:
    """Tokens of a block of `route`, and the grid; with no tokens the grid is empty."""
    together = next(n for n in (1, 2, 4, TILE) if rows <= n or n == TILE)
    return together, (-(-experts // (16 if together == TILE else WARPS)), -(-rows // together), 1)


def sizes(together: int, experts: int, hidden: int, params: RouterParams, bias: bool) -> dict[str, int]:
    """Compile-time constants of router.cu. together: tokens of a block."""
    return dict(
        R=together, EXPERTS=experts, HIDDEN=hidden, TOP=params.top_k, SCORING=SCORINGS.index(params.scoring),
        NORMALISE=int(params.normalise), BIAS=int(bias), WARPS=TILE_WARPS if together == TILE else WARPS,
        GROUPS=params.groups, TOP_GROUPS=params.top_groups, GROUP_TOP=params.group_top,
    )  # fmt: skip


CANDIDATES = (
    Candidate(
        "router.cu", "GPUs", f"up to {ROUTE_EXPERTS} experts, f16 or bf16, softmax or sigmoid", supports, route_cuda
    ),
    Candidate(
        "router.cpp", "CPUs", f"up to {CPU_ROWS} tokens, {ROUTE_EXPERTS} experts, f32 or bf16, softmax or sigmoid",
        supports_cpu, route_cpu,
    ),
    Candidate("torch", "all", "all else", lambda *_: True, route_reference),
)  # fmt: skip
