"""Random experts and choices, and Triton's interpreter on them.

Without a GPU: TRITON_INTERPRET=1 python -m phalanx.tests.kernels.moe.cases
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from phalanx.kernels.moe import moe
from phalanx.kernels.moe.moe import Held, TileConfig, Tiling
from torch import Tensor

from ..attention.decoding import mend_interpreter


class Sizes(NamedTuple):
    tokens: int
    k: int
    experts: int
    hidden: int
    inner: int
    spread: str = "any"  # any; one: all tokens choose the same; few: most experts are empty


# Counts that are no powers of two, one token, empty experts, all tokens to one, sizes that tiles do not divide.
CASES = [
    Sizes(1, 2, 5, 64, 32),
    Sizes(7, 3, 12, 48, 40),
    Sizes(40, 2, 6, 72, 56),
    Sizes(33, 1, 3, 64, 32, "one"),
    Sizes(20, 4, 60, 64, 24, "few"),
    Sizes(50, 5, 5, 40, 80),
]


class Inputs(NamedTuple):
    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor


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


def part(given: Inputs, held: Held) -> Inputs:
    """What a rank with some of the experts gets."""
    here = slice(held.first, held.first + held.size)
    return given._replace(w13=given.w13[here].contiguous(), w2=given.w2[here].contiguous())


def shares(experts: int) -> list[Held]:
    """Of the first expert alone, of the last third, and of two in the middle."""
    third, middle = max(1, experts // 3), experts // 2
    return [Held(0, 1, experts), Held(experts - third, third, experts), Held(middle - 1, 2, experts)]


def near(got: Tensor, want: Tensor, bound: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), atol=bound, rtol=bound)


def main() -> None:
    mend_interpreter()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    tilings = [
        Tiling(TileConfig(rows, outputs, inputs, 4, 2), TileConfig(rows, 2 * outputs, inputs, 4, 2))
        for rows, outputs, inputs in ((16, 16, 16), (32, 32, 64))
    ]
    acts = ("silu", "gelu", "gelu_tanh", "relu2")
    for i, sizes in enumerate(CASES):
        for dtype, bound in ((torch.float32, 3e-6), (torch.float16, 4e-3)):
            given = make(sizes, dtype)
            got = moe.grouped(*given, acts[i % 4], tilings[i % 2])
            near(got, moe.fused_experts_reference(*given, acts[i % 4]), bound)
            held = shares(sizes.experts)[i % 3]
            got = moe.grouped(*part(given, held), acts[i % 4], tilings[i % 2], held)
            near(got, moe.fused_experts_reference(*part(given, held), acts[i % 4], held), bound)


if __name__ == "__main__":
    main()
