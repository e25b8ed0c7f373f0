"""gpt-oss (OpenAI 2025, arXiv 2508.10925): attention sinks, windows in every other layer, biases everywhere, and
experts with a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from ....kernels.activation.activation import CLAMPED_SWIGLU, LIMIT, SLOPE
from ....kernels.moe.router import RouterParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count
from ..batch import Batch
from ..config import FULL, SLIDING
from ..experts.fused import ExpertLayout
from ..layers.attention import Sinks, layer_type
from ..layers.feed_forward import Experts
from ..layers.mlp import limited
from ..layers.residual import Normed, Partial
from ..shard import even
from . import llama, ministral

CONFIG = {
    "defaults": {
        "head_dim": 64,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
}


@dataclass(frozen=True, kw_only=True)
class Args(ministral.Args):
    num_local_experts: int
    num_experts_per_tok: int
    attention_bias: bool = True
    sliding_window: Count | None = 128
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = LIMIT
    swiglu_alpha: float = SLOPE

    def __post_init__(self) -> None:
        base.expect("hidden_act", self.hidden_act, "silu")
        limited(CLAMPED_SWIGLU, self.swiglu_limit)
        base.expect("swiglu_alpha", self.swiglu_alpha, SLOPE)

    def layer_type(self, index: int) -> str:
        return layer_type(self.layer_types, index, FULL if index % 2 else SLIDING)

    def feed_forward(self, index: int) -> Experts:
        params, act = RouterParams(self.num_experts_per_tok, biased=True), limited(CLAMPED_SWIGLU, self.swiglu_limit)
        layout = ExpertLayout("eio", interleaved=True, biased=True)
        return Experts(self.intermediate_size, self.num_local_experts, params, act, layout=layout)


class Attention(llama.Attention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.sinks = Sinks(even(args.num_attention_heads, mesh.tensor.rank, mesh.tensor.size))

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch, sinks=self.sinks.weight))


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(base.Model):
    LAYER = Layer
    RENAMED = {
        ".self_attn.sinks": ".self_attn.sinks.weight",
        ".mlp.router.": ".mlp.gate.",
        ".experts.gate_up_proj_": ".experts.gate_up_proj.",  # bias, blocks, scales
        ".experts.down_proj_": ".experts.down_proj.",
    }
