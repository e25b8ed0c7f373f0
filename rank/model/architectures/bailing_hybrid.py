"""Ling 3 (Ant Group 2026): five layers of Kimi delta attention, whose decays are bounded, to one of latent attention
with a gate for each head, and DeepSeek-V3's experts behind the first layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count
from ..batch import Batch
from ..config import FULL, LINEAR
from ..layers.attention import HeadGates, layer_type
from ..layers.gated_delta_net import DeltaNetShape, WideDeltaAttention
from ..layers.residual import Normed, Partial
from . import deepseek_v2, deepseek_v3, glm4_moe_lite, kimi_linear

CONFIG = {
    "names": {
        "head_dim": "linear_head_dim", "qk_rope_head_dim": "head_dim", "model_max_length": "max_position_embeddings",
        "num_expert_group": "n_group", "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
        "num_experts_per_token": "num_experts_per_tok", "moe_renormalize": "norm_topk_prob",
    },
    "defaults": {"rope_theta": 6000000.0},
}  # fmt: skip
RENAMED = {  # as checkpoints of all generations of Ling have names
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.": ".self_attn.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}


@dataclass(frozen=True, kw_only=True)
class Args(glm4_moe_lite.Args):
    rms_norm_eps: float = 1e-6
    q_lora_rank: int | None = None
    n_group: Count = 8
    topk_group: Count = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 2
    layer_types: list[str] = field(default_factory=list)
    linear_head_dim: Count = 128
    short_conv_kernel_size: Count = 4
    layer_group_size: Count = 6
    kda_safe_gate: bool = True
    kda_lower_bound: float = -5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        base.expect("hidden_act", self.hidden_act, "silu")
        base.expect("q_lora_rank", self.q_lora_rank, None)
        if self.kda_safe_gate and not self.kda_lower_bound < 0:
            raise FatalError(
                f"config.json: kda_lower_bound is {self.kda_lower_bound}, expected a number below 0", MODEL
            )

    def linear(self, index: int) -> bool:
        usual = LINEAR if (index + 1) % self.layer_group_size else FULL
        return layer_type(self.layer_types, index, usual, (FULL, LINEAR)) == LINEAR

    @property
    def delta_net(self) -> DeltaNetShape:
        heads, dim = self.num_attention_heads, self.linear_head_dim
        floor = self.kda_lower_bound if self.kda_safe_gate else 0.0
        return DeltaNetShape(heads, heads, dim, dim, self.short_conv_kernel_size, floor)


class Attention(deepseek_v2.Attention):
    """Latent attention; a sigmoid for each head scales what it reads."""

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.g_proj = HeadGates(args.hidden_size, args.num_attention_heads, mesh)

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        return self.o_proj(self.g_proj.around(h, batch, lambda: self.attend(h, cos_sin, batch)))


class Layer(kimi_linear.Layer):
    ATTENTION = Attention
    DELTA = WideDeltaAttention


class Model(deepseek_v3.Model):
    LAYER = Layer
    MERGED = deepseek_v3.Model.MERGED | WideDeltaAttention.MERGED
    RENAMED = RENAMED | WideDeltaAttention.RENAMED
