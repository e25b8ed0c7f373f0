"""What parts share that keep weights as kernels for quantised weights take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ....kernels import jit
from ....kernels.device import DeviceCaps
from .dense import Part


class Codec(Protocol):
    """A file of kernels/quantized/."""

    @property
    def pack(self) -> Callable[..., tuple[Any, ...]]:
        """The format's tensors as the device's kernels take them: a named tuple, of tensors and what has to be known
        of them."""

    @property
    def linear(self) -> Callable[..., Tensor]:
        """(x, packed, gate, bias): x [T, inputs] → [T, outputs]; with an activation as gate, act(gate) * up of outputs
        that are gate over up."""

    @property
    def variants(self) -> Callable[..., Iterator[jit.KernelVariant]]:
        """(rows, packed, dtype, gate, bias, found): what GEMMs of so many rows, each, are compiled as on this GPU."""


class PackedPart(Part):
    """Some outputs of a linear, which `codec` multiplies. A subclass's `finish` makes what is held."""

    codec: Codec
    packed: tuple[Any, ...]
    rows_apart = False  # whether an output's tensors are its own: then those of several experts are taken at once
    expanded = False  # whether it becomes plain once it is loaded: what reads it takes nothing else

    def encoded(self) -> Sequence[Tensor]:
        """What `codec.pack` takes, of the parameters as they were loaded, [outputs, ...] each."""
        raise NotImplementedError

    def kept_bits(self, device: torch.device) -> float:
        """Of a weight as it is kept there, with its share of what its group has."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """This rank's outputs."""
        return sum(shard.width for shard in self.outputs)

    def kept_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        bits = 8 * dtype.itemsize if self.expanded else self.kept_bits(device)
        bias = self.width * dtype.itemsize if self.bias is not None else 0
        return round(self.width * self.inputs.width * bits / 8) + bias

    def hold(self, packed: tuple[Any, ...]) -> None:
        """Keep this; its tensors become buffers."""
        self.packed = packed
        for index, one in enumerate(packed):
            if isinstance(one, Tensor):
                self.register_buffer(f"packed_{index}", one, persistent=False)

    @property
    def matrix(self) -> None:
        """There is no plain weight: kernels that take one decline."""
        return None

    @property
    def shared(self) -> bool:
        return False

    def variants(
        self, rows: Sequence[int], gate: str, dtype: torch.dtype, found: DeviceCaps
    ) -> Iterator[jit.KernelVariant]:
        return self.codec.variants(rows, self.packed, dtype, gate, self.added_bias is not None, found)

    def forward(self, x: Tensor) -> Tensor:
        return self.codec.linear(x, self.packed, bias=self.added_bias)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        return self.codec.linear(x, self.packed, activation, self.added_bias)
