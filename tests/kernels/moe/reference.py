"""Experts one after the other, in f32 on the CPU, of plain or quantised weights; and what the table of kernels says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from phalanx.kernels.activation.activation import activate
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.gemm.linear import gated_linear, linear
from phalanx.kernels.moe import quantized_experts
from phalanx.kernels.moe.moe import CANDIDATES, Inputs, matrix, of_expert
from phalanx.kernels.quantized.stack import Stack
from torch import Tensor


def fused_experts_reference(given: Inputs) -> Tensor:
    x, ids, weights, w13, w2, act, biases, local_experts, gated = given
    rows, chosen, by = x.float().cpu(), ids.cpu(), weights.float().cpu()
    up, down = (None if bias is None else bias.float().cpu() for bias in biases)
    y = torch.zeros(x.shape, dtype=torch.float32)
    first = local_experts.first if local_experts else 0
    for e in range(w13.shape[0]):
        tokens, places = (chosen == first + e).nonzero(as_tuple=True)
        if len(tokens):
            one, two = (matrix(w, e, x.dtype).float().cpu() for w in (w13, w2))
            own = of_expert(up, e)
            inner = (
                gated_linear(rows[tokens], one, act, own) if gated else activate(linear(rows[tokens], one, own), act)
            )
            made = linear(inner, two, of_expert(down, e))
            y.index_add_(0, tokens, made * by[tokens, places, None])
    return y.to(x)


def planned(routed: int, experts: int, w13: Stack, w2: Stack, found: DeviceCaps, k: int = 64) -> Any:
    """The kernels that compute so many pairs, k of a token, of packed experts on such a GPU: the configs of both GEMMs,
    "GEMVs" or "dequantised". With k above 32 it is no GEMV."""
    x, ids = torch.empty(0, dtype=torch.bfloat16), torch.empty(0, k)
    given: Any = SimpleNamespace(x=x, ids=ids, routed=routed, experts=experts, w13=w13, w2=w2, biased=False)
    plans = (one.plan(given, found) for one in CANDIDATES if one.in_range(routed, experts))
    run: Any = next(filter(None, plans))
    if run.func is quantized_experts.experts:
        return run.args[1]
    return "GEMVs" if run.func is quantized_experts.gemv else "dequantised"


def by_plain_kernels(given: Inputs, found: DeviceCaps) -> Tensor:
    """Experts by the kernels that packed weights become plain for, whatever the number of pairs: [T * k, H]."""
    plans = (one.plan(given, found) for one in CANDIDATES[-2:] if one.in_range(given.routed, given.experts))
    return next(filter(None, plans))()
