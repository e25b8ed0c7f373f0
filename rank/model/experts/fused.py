"""Experts on this rank's device: each split over the tensor group along its inner size, or shared out over it.

With `--ep N`, N neighbours of a tensor group hold different experts, and what is left of its degree splits each. All
ranks of the group have all tokens. So each computes its own experts for those that chose them, and the all-reduce that
follows anyway adds up the rest: no token is sent to where its experts are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import USAGE, FatalError
from ....kernels.moe.moe import Held, fused_experts, tiling_rows
from ..layers.residual import Partial
from ..shard import Shard, even, spread, whole
from ..weights.slicing import Field, ShardedModule


class StackedLinear(ShardedModule):
    """One linear of all experts: this rank's slice of W [experts, outputs, inputs]."""

    fields = (Field("weight", "eoi"),)

    def __init__(self, experts: Shard, inputs: Shard, outputs: tuple[Shard, ...]):
        super().__init__()
        self.experts, self.inputs, self.outputs = experts, inputs, outputs
        shape = experts.width, sum(shard.width for shard in outputs), inputs.width
        self.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Routed:
    """T tokens and their experts."""

    x: Tensor  # [T, H]
    ids: Tensor  # [T, k] int32
    weights: Tensor  # [T, k] f32

    def __len__(self) -> int:
        return len(self.x)


class FusedExperts(nn.Module):
    """Gated feed-forward layers of which each token visits k. Checkpoints may have them apart or stacked."""

    matrix: Tensor | None = None  # no one matrix makes the sum
    added_bias: Tensor | None = None

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, mesh: Mesh, activation: str = "silu"):
        """top_k: experts of a token. activation: the kernels' name. Raises FatalError where a rank would have none."""
        super().__init__()
        if mesh.ep > experts:
            raise FatalError(f"--ep {mesh.ep} is more than the model's {experts} experts", USAGE)
        here, part = share_out(experts, inner, mesh)
        self.gate_up_proj = StackedLinear(here, whole(hidden), (part, part))
        self.down_proj = StackedLinear(here, part, (whole(hidden),))
        self.top_k, self.activation, self.group = top_k, activation, mesh.tensor
        self.held = Held(here.start, here.width, here.size) if mesh.ep > 1 else None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Partial:
        """x [T, H], ids [T, k] int32, weights [T, k] f32. Nothing is multiplied before somebody reads it."""
        return Partial((self, Routed(x, ids, weights)))

    def multiply(self, routed: Routed) -> Tensor:
        """This rank's part of the experts' weighted sums, [T, H]."""
        w13, w2 = self.gate_up_proj.weight, self.down_proj.weight
        return fused_experts(routed.x, routed.ids, routed.weights, w13, w2, self.activation, self.held)

    @property
    def num_weights(self) -> int:
        """Elements of this rank's slices of the experts that one token visits; of experts shared out, on average."""
        one = sum(w.inputs.width * sum(shard.width for shard in w.outputs) for w in (self.gate_up_proj, self.down_proj))
        here = self.down_proj.experts
        return self.top_k * one * here.width // here.size

    def kernel_rows(self) -> list[int]:
        """Numbers of tokens that together use every kernel there is for these experts."""
        return tiling_rows(self.down_proj.experts.size, self.top_k)


def share_out(experts: int, inner: int, mesh: Mesh) -> tuple[Shard, Shard]:
    """This rank's experts, and its part of the inner size of each."""
    part, place = divmod(mesh.tensor.rank, mesh.ep)
    return spread(experts, place, mesh.ep), even(inner, part, mesh.tensor.size // mesh.ep)
