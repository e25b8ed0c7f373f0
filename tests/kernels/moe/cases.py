"""Random experts and choices, and Triton's interpreter on them.

Without a GPU: TRITON_INTERPRET=1 python -m phalanx.tests.kernels.moe.cases
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from phalanx.kernels.activation.activation import ACTIVATIONS, CLAMPED_SWIGLU, clamped
from phalanx.kernels.moe import moe, plain_experts
from phalanx.kernels.moe.moe import Biases, Inputs, LocalExperts
from phalanx.kernels.moe.plain_experts import TileConfig, Tiling
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.stack import Stack, stack
from torch import Tensor

from ..attention.decoding import mend_interpreter
from .reference import fused_experts_reference


class Sizes(NamedTuple):
    tokens: int
    k: int
    experts: int
    hidden: int
    inner: int
    spread: str = "any"  # any; one: all tokens choose the same; few: most experts are empty


def summed(routed: Tensor, given: Inputs) -> Tensor:
    """Adds up [T * k, H] that kernels leave apart, as `fused_experts` does."""
    return moe.summed(moe.apart(routed, given.ids, given.local_experts), given.ids)


# Counts that are no powers of two, one token, empty experts, all tokens to one, sizes that tiles do not divide.
CASES = [
    Sizes(1, 2, 5, 64, 32),
    Sizes(7, 3, 12, 48, 40),
    Sizes(40, 2, 6, 72, 56),
    Sizes(33, 1, 3, 64, 32, "one"),
    Sizes(20, 4, 60, 64, 24, "few"),
    Sizes(50, 5, 5, 40, 80),
]


def make(sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Experts that no token chooses hold NaN: whoever reads them shows."""
    tokens, k, experts, hidden, inner, spread = sizes
    among = k if spread == "one" else min(experts, k + 3) if spread == "few" else experts
    chosen = torch.randperm(experts)[:among]
    ids = torch.stack([chosen[torch.randperm(among)[:k]] for _ in range(tokens)]) if tokens else torch.empty(0, k)
    weights = torch.rand(tokens, k).softmax(-1)
    x = torch.randn(tokens, hidden)
    w13, w2 = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5, torch.randn(experts, hidden, inner) * inner**-0.5
    empty = torch.ones(experts, dtype=torch.bool)
    empty[ids.flatten().long()] = False
    w13[empty], w2[empty] = float("nan"), float("nan")
    found = x.to(dtype), ids.int(), weights, w13.to(dtype), w2.to(dtype)
    return Inputs(*(one.to(device) for one in found))


def without_gate(given: Inputs) -> Inputs:
    """Experts with an up projection and no gate."""
    return given._replace(w13=given.w13[:, given.w2.shape[2] :].contiguous(), act="relu2", gated=False)


def strided(given: Inputs) -> Inputs:
    """With other values between those of x, ids and weights."""
    wide = [torch.stack((one, torch.zeros_like(one)), -1) for one in given[:3]]
    return given._replace(**dict(zip(Inputs._fields, (one[..., 0] for one in wide), strict=False)))


def share_of(given: Inputs, local_experts: LocalExperts) -> Inputs:
    """The inputs of a rank with some of the experts."""
    w13, w2, up, down = (
        None if one is None else one[local_experts.first :][: local_experts.size].contiguous()
        for one in (given.w13, given.w2, *given.biases)
    )
    return given._replace(w13=w13, w2=w2, biases=Biases(up, down), local_experts=local_experts)


def shares(experts: int) -> list[LocalExperts]:
    """Shares of the first expert alone, of the last third, and of two in the middle."""
    third, middle = max(1, experts // 3), experts // 2
    return [
        LocalExperts(0, 1, experts),
        LocalExperts(experts - third, third, experts),
        LocalExperts(middle - 1, 2, experts),
    ]


def biases(given: Inputs) -> Biases:
    """Random ones, with NaN where the matrices have it."""
    found = []
    for weight in (given.w13, given.w2):
        bias = torch.randn(weight.shape[:2], device=weight.device) * 2
        bias[weight[:, 0, 0].isnan()] = float("nan")
        found.append(bias.to(weight.dtype))
    return Biases(*found)


def near(got: Tensor, want: Tensor, bound: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), atol=bound, rtol=bound)


def main() -> None:
    mend_interpreter()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    tilings = [
        Tiling(TileConfig(rows, outputs, inputs, 4, 2), TileConfig(rows, 2 * outputs, inputs, 4, 2))
        for rows, outputs, inputs in ((16, 32, 32), (32, 32, 64))
    ]
    acts = *ACTIVATIONS, clamped(CLAMPED_SWIGLU, 0.5)
    dtypes = [(torch.float32, 3e-6), (torch.float16, 4e-3)]
    for i, sizes in enumerate(CASES):  # each dtype meets both tilings, with biases and without
        tiles = tilings[i % 2]
        dtype, bound = dtypes[i // 2 % 2]
        given = make(sizes, dtype)._replace(act=acts[i % len(acts)])
        near(summed(plain_experts.by_triton(given, tiles), given), fused_experts_reference(given), bound)
        dtype, bound = dtypes[1 - i // 2 % 2]
        given = make(sizes, dtype)._replace(act=acts[-1 - i % len(acts)])
        given = given._replace(biases=biases(given)._replace(**{"down": None} if i == 2 else {}))
        apart = share_of(given, shares(sizes.experts)[i % 3])
        for one in (given, apart, without_gate(make(sizes, dtype))):
            near(summed(plain_experts.by_triton(one, tiles), one), fused_experts_reference(one), bound * 4)
    check_dequantized(tilings[0])


def encoded(weight: Tensor) -> Stack:
    """A stack of weights [E, O, I]."""
    experts, outputs, inputs = weight.shape
    return stack(q8_0, lambda e: q8_0.encode(weight[e].nan_to_num(0)), (experts, outputs, inputs))


def check_dequantized(tiles: Tiling) -> None:
    """Packed experts, some at a time, make the bits of plain ones, also where a rank has some of them."""
    for i, elements in enumerate((1, 3 * 64 * 64, plain_experts.AT_ONCE)):
        plain_experts.AT_ONCE = elements
        given = make(Sizes(20, 3, 7, 64, 32, "few" if i else "any"), torch.float32)
        added = biases(given._replace(w13=given.w13.nan_to_num(0), w2=given.w2.nan_to_num(0))) if i else moe.UNBIASED
        packed = given._replace(w13=encoded(given.w13), w2=encoded(given.w2), biases=added)
        packed = packed._replace(local_experts=LocalExperts(0, 7, 9) if i == 1 else None)
        plain = packed._replace(w13=packed.w13.plain(torch.float32), w2=packed.w2.plain(torch.float32))
        got, want = (summed(plain_experts.by_triton(one, tiles), one) for one in (packed, plain))
        assert torch.equal(got, want)


if __name__ == "__main__":
    main()
