"""Baichuan and Baichuan 2, 7B (Baichuan 2023, arXiv 2309.10305): Llama with one tensor of queries, keys and values, and
in the second a head whose rows are normed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch.nn.functional import normalize

from ....comm.mesh import Mesh
from ....errors import MODEL, USAGE, FatalError
from ..formats import ChooseFormat
from ..formats._format import Format
from ..formats._part import Part
from ..formats._plain import Dense
from ..shard import Shard
from ..weights.slicing import Source
from . import llama

SECOND = 125696  # tokens of Baichuan 2, whose config.json says in no other way which it is
LARGER = 5120  # hidden size of the 13B


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    def __post_init__(self) -> None:
        if self.hidden_size == LARGER:
            raise FatalError("config.json: Baichuan 13B, which attends by distances (ALiBi), is not supported", MODEL)


class NormedPart(Part):
    def finish(self) -> None:
        self.weight.data = normalize(self.weight.data.float()).to(self.weight.dtype)
        super().finish()


@dataclass(frozen=True)
class Normed(Dense):
    """Plain matrices whose rows become vectors of length 1."""

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return NormedPart(inputs, outputs, bias, sources)


class Model(llama.Model):
    RENAMED = {".W_pack.": ".qkv_proj."}

    def __init__(self, args: Args, mesh: Mesh, *given: object):
        self.normed_head = args.vocab_size == SECOND
        super().__init__(args, mesh, *given)  # type: ignore[arg-type]

    def _build(self, names: Collection[str], format_of: ChooseFormat, table_of: ChooseFormat) -> None:
        def of(path: str) -> Format:
            found = format_of(path)
            if not self.normed_head or path != "lm_head":
                return found
            if not found.reads_plain:
                raise FatalError(f"{path}: Baichuan 2's head is served plain alone: leave --isq out", USAGE)
            return Normed()

        super()._build(names, of, table_of)
