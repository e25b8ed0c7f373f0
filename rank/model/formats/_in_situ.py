"""What formats share whose weights are quantised in situ: read plain, and encoded as soon as they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ....errors import USAGE, FatalError
from ....kernels import jit
from ....kernels.device import DeviceCaps
from ..shard import Shard
from ..weights.slicing import Field, Source
from .dense import Part


class Codec(Protocol):
    """A file of kernels/quantized/."""

    GROUP: int  # neighbouring inputs that are encoded together
    BITS: float  # of a weight, with its share of the group's

    @property
    def encode(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """weight [outputs, inputs] of 16 or 32 bits on any device → the tensors of the format."""

    @property
    def pack(self) -> Callable[..., tuple[Any, ...]]:
        """These as the device's kernels take them: a named tuple, of tensors and what has to be known of them."""

    @property
    def linear(self) -> Callable[..., Tensor]:
        """(x, packed, gate, bias): x [T, inputs] → [T, outputs]; with an activation as gate, act(gate) * up of outputs
        that are gate over up."""

    @property
    def variants(self) -> Callable[..., Iterator[jit.KernelVariant]]:
        """(rows, packed, dtype, gate, bias, found): what GEMMs of so many rows, each, are compiled as on this GPU."""


class InSitu(Part):
    """Some outputs of a linear, quantised by `codec`.

    Until it is encoded, the weight has the checkpoint's dtype, not the model's, which may round it. A tied head is
    encoded from the embedding's table. That stays as it is, for tokens are looked up there: the head's codes are memory
    of its own, but a step reads half as much or less.
    """

    fields = (Field("weight", "oi", stored=True), Field("bias", "o"))
    codec: Codec
    packed: tuple[Any, ...]

    def __init__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]):
        super().__init__(inputs, outputs, bias, sources)
        self._check_groups(sources[0].path)

    def _check_groups(self, path: str) -> None:
        group, (size, _, width) = self.codec.GROUP, (self.inputs.size, self.inputs.start, self.inputs.width)
        name = self.name()
        if size % group:
            raise FatalError(
                f"--isq {name}: {path} has {size} inputs, and {name} encodes groups of {group}: serve this model "
                "without --isq",
                USAGE,
            )
        if width % group:
            raise FatalError(
                f"--isq {name}: tensor parallelism leaves each rank {width} of the {size} inputs of {path}, and {name} "
                f"encodes groups of {group}, which stay whole: choose another --tp, or serve without --isq",
                USAGE,
            )

    @classmethod
    def name(cls) -> str:
        """As users write it: the file's."""
        return cls.__module__.rpartition(".")[2]

    def finish(self) -> None:
        self.packed = self.codec.pack(*self.codec.encode(self.weight.data))
        del self.weight
        for index, one in enumerate(self.packed):
            if isinstance(one, Tensor):
                self.register_buffer(f"packed_{index}", one, persistent=False)

    @property
    def matrix(self) -> None:
        """There is no plain weight: kernels that take one decline."""
        return None

    @property
    def shared(self) -> bool:
        return False

    def kept_bytes(self, dtype: torch.dtype) -> int:
        bias = self.bias.numel() * dtype.itemsize if self.bias is not None else 0
        return round(self.weight.numel() * self.codec.BITS / 8) + bias

    def plain_bytes(self, stored: torch.dtype) -> int:
        return self.weight.numel() * stored.itemsize if self.sources else 0

    def variants(
        self, rows: Sequence[int], gate: str, dtype: torch.dtype, found: DeviceCaps
    ) -> Iterator[jit.KernelVariant]:
        return self.codec.variants(rows, self.packed, dtype, gate, self.added_bias is not None, found)

    def forward(self, x: Tensor) -> Tensor:
        return self.codec.linear(x, self.packed, bias=self.added_bias)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        return self.codec.linear(x, self.packed, activation, self.added_bias)
