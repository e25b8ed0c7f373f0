"""OPT (Zhang et al. 2022, arXiv 2205.01068): learned positions, layer norms, biases everywhere, and ReLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from .. import base
from ..layers.linear import ColumnParallel, RowParallel
from ..layers.norm import AddLayerNorm
from ..layers.residual import Normed, Partial
from ..layers.rope import NONE, Parameters
from ..shard import even, whole
from ..weights.slicing import Source
from . import gpt_bigcode, llama

CONFIG = {"names": {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}}
OFFSET = 2  # rows of the positions' table before that of the first token
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    hidden_act: str = "relu"
    enable_bias: bool = True
    do_layer_norm_before: bool = True
    layer_norm_elementwise_affine: bool = True
    word_embed_proj_dim: int | None = None
    tie_word_embeddings: bool = True

    layer_norm_eps: ClassVar[float] = EPS

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

    @property
    def qkv_bias(self) -> bool:
        return self.enable_bias

    @property
    def o_bias(self) -> bool:
        return self.enable_bias

    def rope(self, index: int) -> Parameters:
        return NONE


class ReluMLP(nn.Module):
    def __init__(self, args: Args, mesh: Mesh):
        super().__init__()
        hidden, inner, group = args.hidden_size, args.intermediate_size, mesh.tensor
        self.up_proj = ColumnParallel(whole(hidden), (even(inner, group.rank, group.size),), args.enable_bias)
        self.down_proj = RowParallel(inner, hidden, mesh, args.enable_bias)

    def forward(self, h: Normed) -> Partial:
        return self.down_proj(self.up_proj(h).relu_())


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm = AddLayerNorm(args.hidden_size, EPS)
        self.self_attn = llama.Attention(args, mesh, index, local)
        self.post_attention_layernorm = AddLayerNorm(args.hidden_size, EPS)
        self.mlp = ReluMLP(args, mesh)

    forward = llama.Layer.forward


class Decoder(gpt_bigcode.Decoder):
    def __init__(self, args: Args, mesh: Mesh, layer: type[base.Layer]):
        super().__init__(args, mesh, layer)
        if self.embed_positions is not None:
            rows = args.max_position_embeddings
            self.embed_positions.sources = (Source("model.embed_positions", OFFSET, rows + OFFSET),)


class Model(base.Model):
    LAYER, DECODER = Layer, Decoder
    RENAMED = {
        "model.decoder.": "model.", "model.final_layer_norm.": "model.norm.",
        ".self_attn_layer_norm.": ".input_layernorm.", ".final_layer_norm.": ".post_attention_layernorm.",
        ".out_proj.": ".o_proj.", ".fc1.": ".mlp.up_proj.", ".fc2.": ".mlp.down_proj.",
    }  # fmt: skip

    @classmethod
    def rename(cls, name: str) -> str:
        """Names begin with `decoder.` in older checkpoints."""
        return super().rename(f"model.{name}" if name.startswith("decoder.") else name)
