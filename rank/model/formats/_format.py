"""The protocol of weight formats: what the linears and the experts of a model ask of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ....errors import USAGE, FatalError
from ..shard import Shard, whole_groups
from ..weights.slicing import Source
from ._part import Part
from ._stacks import Stacked, StackOfParts, StoredStack


class Format(ABC):
    """A weight format. Formats of linears that are stored alike are equal: neighbours of one format become one part.

    A part holds some outputs of a linear: it names the tensors that are read (`fields`), converts them once they are
    loaded (`finish`) and multiplies (`forward`, `gated`). A stack does the same for all experts of a layer.
    """

    # Neighbouring inputs of an expert that a cut leaves together; 0: as tensor parallelism cuts plain weights.
    cut_unit = 0
    reads_plain = False  # whether the checkpoint's tensors can be read as plain ones as well

    @abstractmethod
    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        """The part of a linear with these outputs. Raises FatalError where tensor parallelism cuts what is stored
        as one."""

    def stack(self, layer: Stacked, sources: Sequence[Source]) -> StoredStack | None:
        """One linear of all experts, each of them stored as a part of a linear; None: plain weights."""
        return StackOfParts(self.part, layer, sources)

    @property
    def plain(self) -> Format:
        """The format of a linear whose matrix others read: a plain one, where this one leaves weights in 16 bits."""
        return self

    def fitting(self, path: str, size: int, ranks: int) -> Format:
        """This format, or the one that takes its place, with which so many ranks can share each expert's `size` inputs.
        Raises FatalError where none fits."""
        unit = self.cut_unit
        if not unit or size % unit or whole_groups(size, ranks, unit):  # a part reports a size that is no multiple
            return self
        raise FatalError(
            f"{path}: {ranks} ranks cannot share {size} inputs of each expert, which keeps groups of {unit} together: "
            "choose another --tp, or --ep so that ranks hold whole experts",
            USAGE,
        )
