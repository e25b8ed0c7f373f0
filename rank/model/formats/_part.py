"""Plain matrices in 16 or 32 bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels import jit
from ....kernels.device import DeviceCaps
from ....kernels.gemm.linear import gated_linear, linear
from ..shard import Shard
from ..weights.slicing import Field, ShardedModule, Source, pack_weight


class Part(ShardedModule):
    """Some outputs of a linear: x W^T + b of this rank's slice of W [outputs, inputs]."""

    fields: tuple[Field, ...] = (Field("weight", "oi"), Field("bias", "o"))
    packed: Any = None  # a quantised weight as its kernels take it
    looks_up = False  # whether there is `rows`: on CPUs, where embedding tables then stay in this format

    def __init__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]):
        super().__init__()
        self.inputs, self.outputs, self.sources = inputs, tuple(outputs), tuple(sources)
        width = sum(shard.width for shard in outputs)
        self.weight = nn.Parameter(torch.empty(width, inputs.width, device="meta"), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width, device="meta"), requires_grad=False) if bias else None
        self.adds_bias = bias  # of a sum over ranks one rank adds it

    def finish(self) -> None:
        pack_weight(self)

    @property
    def matrix(self) -> Tensor | None:
        """The weight [outputs, inputs] where it is plain: what fused kernels take."""
        return self.weight

    @property
    def added_bias(self) -> Tensor | None:
        """The bias [outputs], where this rank adds it."""
        return self.bias if self.adds_bias else None

    def variants(
        self, rows: Sequence[int], gate: str, dtype: torch.dtype, caps: DeviceCaps
    ) -> Iterator[jit.KernelVariant]:
        """Kernels, where there is no `matrix`, to compile ahead for so many rows, each, of a model's dtype on a GPU.

        gate: the activation where the outputs are gate over up.
        """
        yield from ()

    def forward(self, x: Tensor) -> Tensor:
        """x [T, inputs] of this rank → its [T, outputs]."""
        return linear(x, self.weight, self.added_bias)

    def rows(self, ids: Tensor, start: int, scale: float, dtype: torch.dtype) -> Tensor:
        """Output ids[t] - start for each t, times scale, as an embedding: [T, inputs]; of other ids zeros."""
        raise NotImplementedError

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """The outputs as gate over up: act(gate) * up, [T, outputs / 2]."""
        return gated_linear(x, self.weight, activation, self.added_bias)
