"""The base of parts that keep weights as kernels for quantised weights take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels import jit
from ....kernels.device import DeviceCaps
from ....kernels.quantized import linear, packed_gemm
from ....kernels.quantized.codec import Codec
from ._part import Part


class PackedPart(Part):
    """Some outputs of a linear, which `codec` packs. A subclass's `finish` makes what is held."""

    codec: Codec
    rows_apart = False  # whether an output's tensors are its own: then those of several experts are taken at once
    expanded = False  # whether it becomes plain once it is loaded: what reads it takes nothing else

    def encoded(self) -> Sequence[Tensor]:
        """The arguments of `codec.pack`, of the parameters as they were loaded, [outputs, ...] each."""
        raise NotImplementedError

    def kept_bits(self, device: torch.device) -> float:
        """Bits of a weight as it is kept there, with its share of what its group has; 0: it becomes plain."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """This rank's outputs."""
        return sum(shard.width for shard in self.outputs)

    def kept_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        bits = (0 if self.expanded else self.kept_bits(device)) or 8 * dtype.itemsize
        bias = self.width * dtype.itemsize if self.bias is not None else 0
        return round(self.width * self.inputs.width * bits / 8) + bias

    def hold(self, packed: tuple[Any, ...]) -> None:
        """Keep this, or the plain weight that it is; its tensors become buffers."""
        if self.expanded:
            plain = linear.dequantize(packed, self.model_dtype, 0, self.width)
            self.weight = nn.Parameter(plain, requires_grad=False)
            return
        self.packed = packed
        for index, one in enumerate(packed):
            if isinstance(one, Tensor):
                self.register_buffer(f"packed_{index}", one, persistent=False)

    @property
    def matrix(self) -> Tensor | None:
        """The plain weight, where it is one; None: kernels that take one decline."""
        return self.weight if self.packed is None else None

    @property
    def shared(self) -> bool:
        return False

    def variants(
        self, rows: Sequence[int], gate: str, dtype: torch.dtype, caps: DeviceCaps
    ) -> Iterator[jit.KernelVariant]:
        return packed_gemm.variants(rows, self.packed, dtype, gate, self.added_bias is not None, caps)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(x)
        return linear.linear(x, self.packed, bias=self.added_bias)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        if self.packed is None:
            return super().gated(x, activation)
        return linear.linear(x, self.packed, activation, self.added_bias)
