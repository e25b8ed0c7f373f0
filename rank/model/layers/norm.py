from __future__ import annotations

import torch
from torch import Tensor, nn

from ....comm.base import FusedComm
from ....comm.mesh import Mesh
from ....comm.oneshot import all_reduce_add_norm
from ....kernels import norm
from ..weights.slicing import Field, Sliced
from .shard import whole


class RMSNorm(Sliced):
    """Over the last axis."""

    fields = (Field("weight", "o"),)

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.outputs = (whole(size),)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return norm.rms_norm(x, self.weight, self.eps)


class StreamNorm(RMSNorm):
    """The norm before each half of a layer, which adds what the half before made to the residual stream."""

    def __init__(self, size: int, eps: float, mesh: Mesh):
        super().__init__(size, eps)
        self.tensor = mesh.tensor
        self.alone = mesh.tensor.size == 1
        self.board = mesh.tensor.board if isinstance(mesh.tensor, FusedComm) else None

    def begin(self, x: Tensor, residual: Tensor) -> None:
        """What `add` will be asked for may begin now, beside other work; until then x and residual stay as they are."""
        self.tensor.begin_all_reduce(x, lambda rest: norm.add_rms_norm(x, residual, self.weight, self.eps, rest))

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, H] is this rank's part of what is added: their sum over the tensor group goes to the residual.

        Returns the norm of the new stream, and that stream, equal on all ranks. Both may be overwritten. Without a
        residual, x is the stream, and where both are one tensor it has been added.
        """
        if residual is None or x is residual:
            return norm.rms_norm(x, self.weight, self.eps), x
        begun = self.tensor.end_all_reduce(x)
        return begun or all_reduce_add_norm(self.tensor, x, residual, self.weight, self.eps)
