"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404): a layer keeps of a sequence the newest inputs
of the convolution. A tensor group splits its channels."""

from __future__ import annotations

from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.activation.activation import product
from ..batch import Batch
from ..cache_spec import RecurrentState
from ..shard import even, whole
from .gated_delta_net import CausalConv
from .linear import ColumnParallel, RowParallel
from .residual import Normed, Partial


class ShortConv(nn.Module):
    """out(c * conv(b * x)), where b, c and x are linear in the input. Attributes are named as checkpoints name their
    tensors."""

    def __init__(self, hidden: int, taps: int, bias: bool, mesh: Mesh, local: int):
        """local: the layer's index in this pipeline stage, by which it finds its state."""
        super().__init__()
        part = even(hidden, mesh.tensor.rank, mesh.tensor.size)
        self.local, self.width = local, part.width
        self.in_proj = ColumnParallel(whole(hidden), (part, part, part), bias)
        self.conv = CausalConv((part,), taps, bias)
        self.out_proj = RowParallel(hidden, hidden, mesh, bias)

    def cache_spec(self) -> RecurrentState:
        return RecurrentState(self.conv.columns, self.width)

    def forward(self, h: Normed, batch: Batch) -> Partial:
        """In the last layer only sampled rows continue: h's residual stream is reduced to them."""
        b, c, x = self.in_proj(h).chunk(3, 1)
        out = batch.run(1, self.width, self._mix, product(b, x))
        out, c = batch.reduced(h.keep, self.local, out, c)
        return self.out_proj(product(c, out))

    def _mix(self, batch: Batch, x: Tensor, out: Tensor | None = None) -> Tensor:
        (state,) = batch.caches[self.local]
        return self.conv(x, state, batch, silu=False)
