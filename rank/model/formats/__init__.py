"""Weight formats: one file each, with a class `Part` that holds some outputs of a linear.

A linear is a list of parts, so its outputs may differ in format, as in mixed GGUF files. A part names its tensors
(`fields`) and computes its outputs (`forward`). Once it is loaded, `finish` may convert it: it repacks it for the
device, or quantises it where a model is quantised while loading. A format is found by the name of its file.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...gguf import mixes
from ..shard import Shard
from ..weights.slicing import Source
from ._in_situ import InSitu
from .dense import Part

MakePart = Callable[[Shard, Sequence[Shard], bool, Sequence[Source]], Part]  # inputs, outputs, bias, sources
ChooseFormat = Callable[[str], MakePart]  # from a tensor's path in the checkpoint, without the field's name


def dense(path: str) -> MakePart:
    """The default: unquantised weights of 16 or 32 bits for every linear."""
    return Part


def plain_of(make: MakePart) -> MakePart:
    """What makes a linear whose matrix others read: a plain one, where `make` leaves weights in 16 bits."""
    plain: MakePart = getattr(make, "plain", make)
    return plain


# The linears of which a mix of formats has more bits, by the end of their paths → GGUF's names of them.
MIXED = {
    "lm_head": "output", "v_proj": "attn_v", "qkv_proj": "attn_qkv", "c_attn": "attn_qkv", "kv_b_proj": "attn_kv_b",
    "k_proj": "attn_k", "o_proj": "attn_output", "self_attn.dense": "attn_output", "attn.c_proj": "attn_output",
    "down_proj": "ffn_down", "fc2": "ffn_down", "mlp.c_proj": "ffn_down",
}  # fmt: skip


def in_situ(name: str, sizes: mixes.Sizes) -> ChooseFormat:
    """Every linear is quantised to this format while it is loaded, each to what a mix of them has for it, or none is.

    Where a rank's inputs are not whole groups of a format, the one takes its place that it names for that, if it does.
    """
    if name == "none":
        return dense
    if name not in mixes.MIXES:
        return lambda path: _makes(name)
    return lambda path: _makes(mixes.type_of(name, *_place(path), sizes).lower().replace("_k", "k"))


def _place(path: str) -> tuple[str, int]:
    """GGUF's name of a linear, and the number of its layer."""
    parts = path.split(".")
    part = MIXED.get(".".join(parts[-2:]), MIXED.get(parts[-1], ""))
    return part, next((int(one) for one in parts if one.isdigit()), 0)


@functools.cache
def _makes(name: str) -> MakePart:
    """Equal for linears of one format, so that neighbours become one part."""
    part = _part(name)
    return InSituFormat(part, _part(part.smaller_groups) if part.smaller_groups else part)


@dataclass(frozen=True)
class InSituFormat:
    """What makes parts of `part`, or of `other` where a rank's inputs are not whole groups of it."""

    part: type[InSitu]
    other: type[InSitu]

    @property
    def stack_unit(self) -> int:
        """Neighbouring inputs of an expert that a cut leaves together."""
        return self.part.codec.GROUP

    @property
    def smaller(self) -> InSituFormat | None:
        """What experts get whose inputs cannot be cut between groups."""
        return InSituFormat(self.other, self.other) if self.other is not self.part else None

    def __call__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> InSitu:
        return (self.part if self.part.takes(inputs) else self.other)(inputs, outputs, bias, sources)


def _part(name: str) -> type[InSitu]:
    part: type[InSitu] = importlib.import_module(f".{name}", __name__).Part
    return part
