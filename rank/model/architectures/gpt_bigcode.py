"""SantaCoder and StarCoder (Ben Allal et al. 2023, arXiv 2301.03988; Li et al. 2023, arXiv 2305.06161).

GPT-2 with multi-query attention (Shazeer 2019, arXiv 1911.02150): learned positions, layer norms, biases everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ....comm.mesh import Mesh
from ....kernels.attention.attention import AttentionParams
from .. import base
from ..batch import Batch
from ..layers.embedding import PositionEmbedding
from ..layers.feed_forward import Dense
from ..layers.rope import NONE, Parameters
from . import llama

CONFIG = {"like": "gpt2", "defaults": {"num_key_value_heads": 1}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    qkv_bias: ClassVar[bool] = True
    o_bias: ClassVar[bool] = True
    layer_norms: ClassVar[bool] = True

    intermediate_size: int = 0  # is not read:
    n_inner: int | None = None  # None: four times the hidden size
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-5
    multi_query: bool = True
    scale_attn_weights: bool = True
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        base.expect("multi_query", self.multi_query, True)
        base.expect("add_cross_attention", self.add_cross_attention, False)

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams(scale=self.head_dim**-0.5 if self.scale_attn_weights else 1.0)

    def rope(self, index: int) -> Parameters:
        return NONE

    def feed_forward(self, index: int) -> Dense:
        return Dense(self.n_inner or 4 * self.hidden_size, self.hidden_act, bias=True, gated=False)


class Decoder(base.Decoder):
    def __init__(self, args: base.Args, mesh: Mesh, layer: type[base.Layer]):
        super().__init__(args, mesh, layer)
        positions = PositionEmbedding(args.max_position_embeddings, args.hidden_size)
        self.embed_positions = positions if mesh.first else None

    def embed(self, batch: Batch) -> Tensor:
        assert self.embed_positions is not None
        return super().embed(batch).add_(self.embed_positions(batch.positions))


class Model(llama.Model):
    DECODER = Decoder
    MERGED = {"o_proj": ("c_proj",), "up_proj": ("c_fc",), "down_proj": ("c_proj",)}
    RENAMED = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.wpe.": "model.embed_positions.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
        ".ln_1.": ".input_layernorm.",
        ".attn.": ".self_attn.",
        ".self_attn.c_attn.": ".self_attn.qkv_proj.",
        ".ln_2.": ".post_attention_layernorm.",
    }
