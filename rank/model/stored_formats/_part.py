"""The base of the parts of all quantised checkpoints: parameters as the checkpoint stores them, repacked when
loaded."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....errors import MODEL, USAGE, FatalError
from ....kernels.quantized import affine, packing_cpu
from ..formats._format import Format
from ..formats._packed import PackedPart
from ..formats._part import Part
from ..shard import Shard
from ..weights.slicing import Codes, Field, Scales, ShardedModule, Source, check_cuts, stored_shape
from . import INSTEAD

BIAS = Field("bias", "o")


class StoredPart(PackedPart):
    """Some outputs of a linear. Until `finish`, its parameters are the checkpoint's `fields`."""

    def __init__(
        self,
        fields: Sequence[Field],
        inputs: Shard,
        outputs: Sequence[Shard],
        bias: bool,
        sources: Sequence[Source],
    ):
        """fields: without the bias. Raises FatalError where tensor parallelism parts what is stored as one."""
        ShardedModule.__init__(self)
        self.inputs, self.outputs, self.sources = inputs, tuple(outputs), tuple(sources)
        self.fields = (*fields, BIAS)
        check_cuts(self)
        for field in self.fields:
            made = nn.Parameter(torch.empty(stored_shape(self, field), device="meta"), requires_grad=False)
            setattr(self, field.name, made if bias or field is not BIAS else None)
        self.adds_bias = bias

    def finish(self) -> None:
        encoded = self.encoded()
        self.drop()
        self.hold(self.codec.pack(*encoded))

    def drop(self) -> None:
        """Give back all parameters but the bias."""
        for field in self.fields:
            if field is not BIAS:
                delattr(self, field.name)

    def plain_bytes(self, stored: torch.dtype) -> int:
        sizes = {name: parameter.numel() for name, parameter in self.named_parameters(recurse=False)}
        return sum(sizes[one.name] * self.dtype_of(one.name, stored).itemsize for one in self.fields if one is not BIAS)


class Grouping(NamedTuple):
    """How weights are grouped that have a scale and a zero point for each group of inputs."""

    bits: int  # of a code
    group: int  # inputs of a group; 0: all are one
    symmetric: bool  # zero points lie in the middle

    # Constants of random weights. A mean other than 0 would make all tokens alike, so that they choose the same
    # experts, and so would zero points far from the middle.

    @property
    def codes(self) -> Codes:
        return Codes(self.bits, 1, (1 << self.bits) - 1)

    def zeros(self, offset: int = 0) -> Codes:
        """offset: by which they are more than what is stored."""
        middle, width = (1 << self.bits - 1) - offset, int(not self.symmetric)
        return Codes(self.bits, middle - width, middle + width)

    @property
    def scales(self) -> Scales:
        return Scales((self.codes.variance + self.zeros().variance) ** 0.5)


@dataclass(frozen=True)
class GroupedFormat(Format):
    """Weights of which each group of inputs has a scale and a zero point."""

    grouping: Grouping

    cut_unit = affine.UNIT

    @abstractmethod
    def fields(self, inputs: Shard) -> Sequence[Field]:
        """The tensors of a linear, without its bias."""

    @abstractmethod
    def decode(self, part: GroupedPart) -> tuple[Tensor, Tensor, Tensor]:
        """codes uint8 [O, I], scales f32 and zeros int16 [O, groups], of the part's groups of `unit` inputs."""

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return GroupedPart(self, inputs, outputs, bias, sources)


class GroupedPart(StoredPart):
    """Some outputs of a linear in such a format."""

    codec = affine

    def __init__(
        self, form: GroupedFormat, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]
    ):
        """Raises FatalError where kernels cannot take this rank's part."""
        super().__init__(form.fields(inputs), inputs, outputs, bias, sources)
        self.form, self.grouping, self.group = form, form.grouping, form.grouping.group
        self.unit = math.gcd(self.group, inputs.start, inputs.width)  # of groups, as the rank's cuts leave them
        if self.unit % affine.UNIT:
            size, path = inputs.size, sources[0].path
            raise FatalError(
                f"{path}: kernels take groups of a multiple of {affine.UNIT} inputs, and these have "
                f"{self.group or size}, of which a rank gets {inputs.width} of {size}"
                + (": choose another --tp" if inputs.width < size else ""),
                USAGE if inputs.width < size else MODEL,
            )

    def kept_bits(self, device: torch.device) -> float:
        bits, _, symmetric = self.grouping
        return affine.kept_bits(bits, self.unit, self.inputs.width, symmetric, device)

    def encoded(self) -> Sequence[Tensor]:
        return [one.contiguous() for one in self.form.decode(self)]

    def read(self, field: str) -> Tensor:
        """The loaded tensor of a field."""
        return self.get_parameter(field).data

    def spread(self, table: Tensor) -> Tensor:
        """[O, groups] of the checkpoint's groups that this rank's inputs touch → of its own groups of `unit`."""
        if not self.group:
            return table.expand(-1, self.inputs.width // self.unit)
        table = table.repeat_interleave(self.group // self.unit, 1)
        return table.narrow(1, self.inputs.start % self.group // self.unit, self.inputs.width // self.unit)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., N] → codes of 4 or 8 bits, uint8 [..., N * 32 / bits], those of lower bits first."""
    codes = packed.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def unpack_transposed(packed: Tensor, bits: int) -> Tensor:
    """int32 [N, O] → codes of 4 or 8 bits along N, uint8 [O, N * 32 / bits]."""
    if bits == 4 and packing_cpu.takes(packed):
        return packing_cpu.unpack_words(packed, "inputs")
    return unpack(packed.t(), bits)


def check_settings(settings: dict[str, Any], **choices: Sequence[object]) -> None:
    """Raises FatalError where a key of quantization_config has none of the values that are supported."""
    for key, supported in choices.items():
        if settings.get(key) not in supported:
            raise FatalError(
                f"config.json: quantization_config has {key} {settings.get(key)!r}; supported are "
                f"{', '.join(map(repr, supported))}: {INSTEAD}",
                MODEL,
            )


def group_size(settings: dict[str, Any], *keys: str) -> int:
    """Inputs of a group, by the first of these keys that is there; 0: all inputs are one."""
    size = next((settings[key] for key in keys if settings.get(key) is not None), 128)
    if not isinstance(size, int) or isinstance(size, bool) or size < -1:
        raise FatalError(f"config.json: quantization_config has {keys[0]} {size!r}, expected a number of inputs", MODEL)
    return max(size, 0)
