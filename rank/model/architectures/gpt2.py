"""GPT-2 (Radford et al. 2019): learned positions, layer norms, biases everywhere, and matrices with inputs before
outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ....errors import USAGE, FatalError
from ....kernels.attention.attention import AttentionParams
from ..formats import ChooseFormat
from ..formats._format import Format
from ..formats._part import Part
from ..formats._plain import Dense
from ..shard import Shard
from ..weights.slicing import Field, Source, parameter
from . import gpt_bigcode

CONFIG = {
    "names": {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(gpt_bigcode.Args):
    hidden_act: str = "gelu_new"
    scale_attn_by_inverse_layer_idx: bool = False

    def attention_params(self, index: int) -> AttentionParams:
        params = super().attention_params(index)
        return params._replace(scale=params.scale / (index + 1 if self.scale_attn_by_inverse_layer_idx else 1))


class TurnedPart(Part):
    fields = Field("weight", "io"), Field("bias", "o")

    def __init__(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]):
        super().__init__(inputs, outputs, bias, sources)
        self.weight = parameter(self.weight.shape[::-1])

    def finish(self) -> None:
        self.weight.data = self.weight.data.T.contiguous()
        super().finish()


@dataclass(frozen=True)
class Turned(Dense):
    """Plain matrices that checkpoints hold as [inputs, outputs]."""

    def part(self, inputs: Shard, outputs: Sequence[Shard], bias: bool, sources: Sequence[Source]) -> Part:
        return TurnedPart(inputs, outputs, bias, sources)


class Model(gpt_bigcode.Model):
    @classmethod
    def rename(cls, name: str) -> str:
        """Names begin with the model's parts in some checkpoints, with `transformer.` in others."""
        bare = name.startswith(("wte.", "wpe.", "h.", "ln_f."))
        return super().rename(f"transformer.{name}" if bare else name)

    def _build(self, names: Collection[str], format_of: ChooseFormat, table_of: ChooseFormat) -> None:
        def turned(path: str) -> Format:
            found = format_of(path)
            if not found.reads_plain:
                raise FatalError(f"{path}: this model's matrices are served plain alone: leave --isq out", USAGE)
            return Turned() if path.startswith("model.layers.") else found

        super()._build(names, turned, table_of)
