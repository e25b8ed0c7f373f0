"""Experts in e4m3 whose rows are e4m3, too, one after the other, in f64: each GEMM apart, from what it was given."""

from __future__ import annotations

from typing import Any

import torch
from phalanx.kernels.activation.activation import gated_activation_reference
from phalanx.kernels.moe.group import Groups
from phalanx.kernels.moe.moe import Inputs
from phalanx.kernels.quantized import cuda_layouts, packed_gemm
from phalanx.kernels.quantized.linear import dequantize
from phalanx.kernels.quantized.stack import Stack
from torch import Tensor

from ..quantized import floats_cases
from ..quantized.floats_cases import rounded

# Bounds of the norm of an expert's error: outputs in 16 bits, and what tensor cores drop of sums of 128 to 512 inputs.
# With a gate two factors are rounded before, and the weight's product is.
BOUND = {torch.bfloat16: 2**-8, torch.float16: 2**-9}


def stack_of(experts: int, outputs: int, inputs: int, unit: int, device: str = "cpu") -> tuple[Stack, Tensor]:
    """Random weights [E, O, I] in wide tiles, of which `unit` inputs share a scale, and what they mean in f64."""
    made = [floats_cases.make(outputs, inputs, unit, seed=seed) for seed in range(experts)]
    made = [one._replace(scales=one.scales * 6 / inputs**0.5) for one in made]  # outputs of about one
    packed = [cuda_layouts.pack_wide(*one) for one in made]
    n_tiles = -(-outputs // 16) * 16
    whole = packed_gemm.Packed(torch.cat([one.tiles for one in packed]).to(device), experts * n_tiles, packed[0].layout)
    weights = torch.stack([dequantize(one).double() for one in made]).to(device)
    return Stack(whole, (experts, outputs, inputs)), weights


def places(groups: Groups, expert: int) -> slice:
    """Places of its routed tokens, in the order of the groups."""
    return slice(int(groups.offsets[expert]), int(groups.offsets[expert + 1]))


def check_codes(
    found: tuple[Tensor, Tensor, Tensor], x: Tensor, groups: Groups, weights: Tensor, top: int,
    want: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Codes, scales and weights by place, where want are those of the rows of x."""
    last = int(groups.offsets[-1])
    sorted_ids = groups.sorted_ids[:last].long()
    rows = sorted_ids // top if top else torch.arange(last, device=x.device)
    codes, scales = want[0][rows], want[1][rows]
    torch.testing.assert_close(found[1][:last], scales, rtol=1e-6, atol=0)
    assert torch.equal(found[2][:last], weights.flatten()[sorted_ids])
    apart = found[0][:last] != codes
    most = 1e-3 * apart.numel()  # quotients that round another way
    assert apart.sum() <= most, f"of place {apart.any(1).nonzero()[:5].tolist()}"


def check_up(h: Tensor, x: Tensor, weights: Tensor, groups: Groups, up: Tensor, top: int, act: str, bias: Any) -> None:
    """h [P, I], in the order of the groups."""
    for e in range(len(up)):
        here = places(groups, e)
        routed = groups.sorted_ids[here].long()
        if not len(routed):
            continue
        both = rounded(x[routed // top]) @ up[e].T + (0 if bias is None else bias[e].double())
        want = gated_activation_reference(both.to(h.dtype).float(), act).double()
        near(
            h[here], want * weights.flatten()[routed].double().unsqueeze(1), BOUND[h.dtype] * 2.5,
            ("up", e, len(routed)),
        )  # fmt: skip


def check_down(y: Tensor, h: Tensor, weights: Tensor, groups: Groups, down: Tensor, bias: Any) -> None:
    """y [P, H], in the routed tokens' own order, of h [P, I]."""
    for e in range(len(down)):
        here = places(groups, e)
        routed = groups.sorted_ids[here].long()
        if not len(routed):
            continue
        added = 0 if bias is None else bias[e].double() * weights.flatten()[routed].double().unsqueeze(1)
        near(y[routed], rounded(h[here]) @ down[e].T + added, BOUND[y.dtype], ("down", e, len(routed)))


def with_plain_rows(given: Inputs, up: Tensor, down: Tensor) -> Tensor:
    """[T, H] of inputs that are not rounded."""
    y = torch.zeros(given.x.shape, dtype=torch.float64, device=given.x.device)
    for e in range(len(up)):
        rows, place = (given.ids == e).nonzero(as_tuple=True)
        inner = gated_activation_reference((given.x[rows].double() @ up[e].T).float(), given.act).double()
        y.index_add_(0, rows, inner @ down[e].T * given.weights[rows, place].double().unsqueeze(1))
    return y


def near(found: Tensor, want: Tensor, bound: float, about: tuple[object, ...]) -> None:
    """Compares each row; reports what is off by more: which rows and which columns of the first of them."""
    error = (found.double() - want).abs()
    apart = error.norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    bad = (~(apart < bound)).nonzero().flatten()
    if not len(bad):
        return
    row = int(bad[0])
    columns = (~(error[row] < 8 * bound * want[row].abs().mean())).nonzero().flatten()
    raise AssertionError(
        f"{about}: {len(bad)} of {len(found)} rows are off, the first ones {bad[:12].tolist()}, by {apart[row]:.4f}; "
        f"row {row} in columns {columns[:16].tolist()} of {len(columns)}: {found[row][columns[:4]].tolist()}, "
        f"not {want[row][columns[:4]].tolist()}"
    )
