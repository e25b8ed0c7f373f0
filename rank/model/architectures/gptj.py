"""GPT-J (Wang and Komatsuzaki 2021): Phi's parallel layers with interleaved rope and no biases in attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import base
from ..layers.rope import Parameters
from . import gpt_bigcode, llama

CONFIG = {"like": "gpt2"}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    head_bias: ClassVar[bool] = True
    layer_norms: ClassVar[bool] = True
    parallel: ClassVar[bool] = True

    intermediate_size: int = 0  # is not read:
    n_inner: int | None = None  # None: four times the hidden size
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    rotary_dim: int | None = 64  # None: all of a head

    def __post_init__(self) -> None:
        base.expect("tie_word_embeddings", self.tie_word_embeddings, False)

    def rope(self, index: int) -> Parameters:
        part = (self.rotary_dim or self.head_dim) / self.head_dim
        return self.rope_parameters | {"partial_rotary_factor": part, "interleaved": True}

    feed_forward = gpt_bigcode.Args.feed_forward


class Model(llama.Model):
    RENAMED = {
        "transformer.wte.": "model.embed_tokens.", "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.", ".ln_1.": ".input_layernorm.", ".attn.": ".self_attn.",
        ".out_proj.": ".o_proj.", ".mlp.fc_in.": ".mlp.up_proj.", ".mlp.fc_out.": ".mlp.down_proj.",
    }  # fmt: skip
