"""Kimi Linear (Moonshot AI 2025, arXiv 2510.26692): three layers of Kimi delta attention to one of latent attention
that is not rotated, and DeepSeek-V3's experts behind the first layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.attention.attention import AttentionParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count
from ..batch import Batch
from ..config import FULL, LINEAR, MOST
from ..layers.attention import layer_type
from ..layers.gated_delta_net import DeltaNetShape, KimiDeltaAttention
from ..layers.residual import Normed, Partial
from ..layers.rope import NONE, Parameters
from . import deepseek_v2, deepseek_v3, glm4_moe_lite, mixtral

CONFIG = {
    "names": {
        "qk_rope_head_dim": "head_dim", "model_max_length": "max_position_embeddings", "num_expert_group": "n_group",
        "num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts", "moe_renormalize": "norm_topk_prob",
        "moe_router_activation_func": "scoring_func",
    }
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(glm4_moe_lite.Args):
    q_lora_rank: int | None = None
    routed_scaling_factor: float = 2.446
    mla_use_nope: bool = True
    layer_types: list[str] = field(default_factory=list)
    linear_attn_config: dict[str, Any] = field(default_factory=dict)
    linear_head_dim: Count = 128
    linear_num_heads: Count = 32
    linear_conv_kernel_dim: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        base.expect("mla_use_nope", self.mla_use_nope, True)
        base.expect("hidden_act", self.hidden_act, "silu")

    def linear(self, index: int) -> bool:
        """Whether a layer has Kimi delta attention. `linear_attn_config` numbers layers from 1."""
        usual, types, given = LINEAR if index % 4 or not index else FULL, self.layer_types, self.linear_attn_config
        if not types and {"kda_layers", "full_attn_layers"} <= given.keys():
            delta, full = given["kda_layers"], given["full_attn_layers"]
            if not isinstance(delta, list) or not isinstance(full, list):
                raise FatalError("config.json: kda_layers and full_attn_layers are to be lists of layers", MODEL)
            layers = range(1, self.num_hidden_layers + 1)
            types = [LINEAR if i in delta else FULL if i in full else "none" for i in layers]
        return layer_type(types, index, usual, (FULL, LINEAR)) == LINEAR

    @property
    def delta_net(self) -> DeltaNetShape:
        heads = self._count("num_heads", self.linear_num_heads)
        dim = self._count("head_dim", self.linear_head_dim)
        return DeltaNetShape(heads, heads, dim, dim, self._count("short_conv_kernel_size", self.linear_conv_kernel_dim))

    def _count(self, key: str, usual: int) -> int:
        value = self.linear_attn_config.get(key, usual)
        if not isinstance(value, int) or not 1 <= value <= MOST:
            raise FatalError(f"config.json: linear_attn_config.{key} is {value!r}, expected an int, at least 1", MODEL)
        return value

    def rope(self, index: int) -> Parameters:
        return NONE

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)


class Layer(deepseek_v2.Layer):
    DELTA: type[KimiDeltaAttention] = KimiDeltaAttention

    def make_mixer(self, args: Any, mesh: Mesh, index: int, local: int) -> None:
        if args.linear(index):
            self.self_attn = self.DELTA(args.hidden_size, args.delta_net, args.rms_norm_eps, mesh, local)
        else:
            super().make_mixer(args, mesh, index, local)

    def mix(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        delta = isinstance(self.self_attn, KimiDeltaAttention)
        return self.self_attn(h, batch) if delta else self.self_attn(h, cos_sin, batch)


class Model(deepseek_v3.Model):
    LAYER = Layer
    MERGED = deepseek_v3.Model.MERGED | KimiDeltaAttention.MERGED
    RENAMED = mixtral.Model.RENAMED | KimiDeltaAttention.RENAMED
