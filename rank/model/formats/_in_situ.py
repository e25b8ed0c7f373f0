"""What formats share whose weights are quantised in situ: read plain, and encoded as soon as they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ....errors import USAGE, FatalError
from ..shard import Shard
from ..weights.slicing import Field, Source
from ._packed import Codec, PackedPart


class Encoder(Codec, Protocol):
    """A codec that weights are quantised with."""

    GROUP: int  # neighbouring inputs that are encoded together

    @property
    def kept_bits(self) -> Callable[[int, torch.device], float]:
        """(inputs, device): of a weight as `pack` keeps it there, with its share of the rest."""

    @property
    def encode(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """weight [outputs, inputs] of 16 or 32 bits on any device → the tensors of the format."""


class InSitu(PackedPart):
    """Some outputs of a linear, quantised by `codec`.

    Until it is encoded, the weight has the checkpoint's dtype, not the model's, which may round it. A tied head is
    encoded from the embedding's table. That stays as it is, for tokens are looked up there: the head's codes are memory
    of its own, but a step reads half as much or less.
    """

    fields = (Field("weight", "oi", stored=True), Field("bias", "o"))
    codec: Encoder
    rows_apart = True
    smaller_groups = ""  # the format that takes its place where a rank's inputs are not whole groups; none: refused

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
    def takes(cls, inputs: Shard) -> bool:
        """Whether this rank's inputs are whole groups."""
        return inputs.size % cls.codec.GROUP == inputs.width % cls.codec.GROUP == 0

    @classmethod
    def name(cls) -> str:
        """As users write it: the file's."""
        return cls.__module__.rpartition(".")[2]

    def encoded(self) -> Sequence[Tensor]:
        return self.codec.encode(self.weight.data)

    def kept_bits(self, device: torch.device) -> float:
        return self.codec.kept_bits(self.inputs.width, device)

    def finish(self) -> None:
        self.hold(self.codec.pack(*self.encoded()))
        del self.weight

    def plain_bytes(self, stored: torch.dtype) -> int:
        return self.weight.numel() * stored.itemsize if self.sources else 0
