"""OPT (Zhang et al. 2022, arXiv 2205.01068): learned positions, layer norms, biases everywhere, and ReLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from .. import base
from ..layers.feed_forward import Dense
from ..layers.linear import ColumnParallel, RowParallel
from ..layers.residual import Normed, Partial
from ..layers.rope import NONE, Parameters
from ..shard import even, whole
from ..weights.slicing import Source
from . import gpt_bigcode, llama

CONFIG = {
    "names": {
        "ffn_dim": "intermediate_size", "activation_function": "hidden_act", "enable_bias": "attention_bias",
    }
}  # fmt: skip
OFFSET = 2  # rows of the positions' table before that of the first token


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    hidden_act: str = "relu"
    attention_bias: bool = True
    do_layer_norm_before: bool = True
    layer_norm_elementwise_affine: bool = True
    word_embed_proj_dim: int | None = None
    tie_word_embeddings: bool = True

    layer_norms: ClassVar[bool] = True
    layer_norm_eps: ClassVar[float] = 1e-5

    def __post_init__(self) -> None:
        base.expect("hidden_act", self.hidden_act, "relu")
        base.expect("do_layer_norm_before", self.do_layer_norm_before, True)
        base.expect("layer_norm_elementwise_affine", self.layer_norm_elementwise_affine, True)
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            raise FatalError(
                f"config.json: word_embed_proj_dim {self.word_embed_proj_dim} is not supported where it is another "
                f"than the hidden_size of {self.hidden_size}",
                MODEL,
            )

    def rope(self, index: int) -> Parameters:
        return NONE

    def feed_forward(self, index: int) -> ReluDense:
        return ReluDense(self.intermediate_size, self.hidden_act, self.attention_bias)


class ReluMLP(nn.Module):
    def __init__(self, hidden: int, inner: int, bias: bool, mesh: Mesh):
        super().__init__()
        outputs = even(inner, mesh.tensor.rank, mesh.tensor.size)
        self.up_proj = ColumnParallel(whole(hidden), (outputs,), bias)
        self.down_proj = RowParallel(inner, hidden, mesh, bias)

    def forward(self, h: Normed) -> Partial:
        return self.down_proj(self.up_proj(h).relu_())


class ReluDense(Dense):
    def make(self, hidden: int, mesh: Mesh) -> ReluMLP:
        return ReluMLP(hidden, self.inner, self.bias, mesh)


class Decoder(gpt_bigcode.Decoder):
    def __init__(self, args: Args, mesh: Mesh, layer: type[base.Layer]):
        super().__init__(args, mesh, layer)
        if self.embed_positions is not None:
            rows = args.max_position_embeddings
            self.embed_positions.sources = (Source("model.embed_positions", OFFSET, rows + OFFSET),)


class Model(llama.Model):
    DECODER = Decoder
    RENAMED = {
        "model.decoder.": "model.", "model.final_layer_norm.": "model.norm.",
        ".self_attn_layer_norm.": ".input_layernorm.", ".final_layer_norm.": ".post_attention_layernorm.",
        ".out_proj.": ".o_proj.", ".fc1.": ".mlp.up_proj.", ".fc2.": ".mlp.down_proj.",
    }  # fmt: skip

    @classmethod
    def rename(cls, name: str) -> str:
        """Names begin with `decoder.` in older checkpoints."""
        return super().rename(f"model.{name}" if name.startswith("decoder.") else name)
