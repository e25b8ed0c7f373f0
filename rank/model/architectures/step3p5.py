"""Step 3.5 Flash (StepFun 2026): sliding layers with more heads than those of full attention, a gate for each head,
and a shared expert; SwiGLU is clamped behind silu in some layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ....comm.mesh import Mesh
from ....errors import MODEL, USAGE, FatalError
from ....kernels.activation.activation import SILU_CLAMPED
from ....kernels.attention.attention import AttentionParams
from ....kernels.moe.router import RouterParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count, Divisor
from ..batch import Batch
from ..config import FULL, SLIDING
from ..layers.attention import HeadGates, layer_type
from ..layers.feed_forward import Dense, Experts, FeedForward
from ..layers.linear import QKVParallel, RowParallel
from ..layers.mlp import limited
from ..layers.moe import MoE
from ..layers.residual import Normed, Partial
from ..layers.rope import Parameters
from . import glm4_moe_lite, llama, ministral

CONFIG = {
    "names": {
        "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
        "attention_other_setting.num_attention_heads": "num_sliding_attention_heads",
    },
    "defaults": {"head_dim": 128, "num_key_value_heads": 8},
    "rope_per_layer_type": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(ministral.Args):
    rms_norm_eps: float = 1e-5
    sliding_window: Count | None = None
    num_sliding_attention_heads: int = 0  # 0: as many as in other layers
    query_pre_attn_scalar: Divisor = 0.0  # 0: head_dim
    use_head_wise_attn_gate: bool = True
    rope_theta: Any = None  # one for each layer, or what rope_parameters has
    partial_rotary_factors: list[float] | None = None
    mlp_layer_types: list[str] = field(default_factory=list)
    moe_layers_enum: Any = None  # the layers with experts, as a list or with commas between them
    n_routed_experts: Count = 288
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1280
    share_expert_dim: Count = 1280
    moe_router_scaling_factor: float = 1.0
    moe_router_activation: str = "sigmoid"
    mtp_layer_types: list[str] = field(default_factory=list)  # of layers that predict further tokens
    mtp_mlp_layer_types: list[str] = field(default_factory=list)
    swiglu_limits: Any = None  # of each layer's experts; 0 or null: none
    swiglu_limits_shared: Any = None  # of its shared expert, or of its MLP

    norm_offset: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "query_pre_attn_scalar", self.query_pre_attn_scalar or self.head_dim)
        heads = self.num_sliding_attention_heads or self.num_attention_heads
        object.__setattr__(self, "num_sliding_attention_heads", heads)
        for name in ("layer_types", "mlp_layer_types"):
            types = getattr(self, name)
            if types:  # published lists have layers that predict further tokens at their ends
                behind = types[self.num_hidden_layers :] or getattr(self, f"mtp_{name}")
                object.__setattr__(self, name, [*types[: self.num_hidden_layers], *behind])
        base.expect("hidden_act", self.hidden_act, "silu")
        base.expect("use_head_wise_attn_gate", self.use_head_wise_attn_gate, True)
        base.expect("moe_router_activation", self.moe_router_activation, "sigmoid")

    @property
    def draft_layer(self) -> int:
        return self.num_hidden_layers

    def layer_type(self, index: int) -> str:
        return layer_type(self.layer_types, index, FULL)

    def heads(self, index: int) -> int:
        sliding = self.layer_type(index) == SLIDING
        return self.num_sliding_attention_heads if sliding else self.num_attention_heads

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams(self.query_pre_attn_scalar**-0.5, self.window(index))

    def rope(self, index: int) -> Parameters:
        found = self.rope_parameters[self.layer_type(index)]
        if isinstance(self.rope_theta, list):
            found = found | {"rope_theta": self._of_layer("rope_theta", index)}
        if self.partial_rotary_factors is not None:
            found = found | {"partial_rotary_factor": self._of_layer("partial_rotary_factors", index)}
        return found

    def sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        listed = self.moe_layers_enum
        try:
            numbers = {int(one) for one in (listed.split(",") if isinstance(listed, str) else listed or ())}
        except (TypeError, ValueError):
            raise FatalError(f"config.json: moe_layers_enum is {listed!r}, expected numbers of layers", MODEL) from None
        return glm4_moe_lite.sparse(self.mlp_layer_types, index, index in numbers if listed else index >= 3)

    def feed_forward(self, index: int) -> FeedForward:
        act = self.activation("swiglu_limits_shared", index)
        if not self.sparse(index):
            return Dense(self.intermediate_size, act, self.mlp_bias)
        scale = self.moe_router_scaling_factor
        params = RouterParams(self.num_experts_per_tok, "sigmoid", corrected=True, scale=scale)
        return Experts(self.moe_intermediate_size, self.n_routed_experts, params, act, self.share_expert_dim)

    def activation(self, key: str, index: int) -> str:
        """The activation of a layer, by a list of limits."""
        limits = getattr(self, key)
        drafts = index >= self.num_hidden_layers and isinstance(limits, list) and index >= len(limits)
        limit = self._of_layer(key, index, zero=True) if limits and not drafts else 0.0
        return limited(SILU_CLAMPED, limit, f"{key}[{index}]") if limit else "silu"

    def _of_layer(self, key: str, index: int, zero: bool = False) -> float:
        """A layer's entry in a list, which may have more of them. zero: 0 and null are entries, too."""
        entries = getattr(self, key)
        entry = entries[index] or 0.0 if isinstance(entries, list) and index < len(entries) else None
        if not isinstance(entry, int | float) or entry < 0 or not (entry or zero):
            raise FatalError(f"config.json: {key} is {entries!r}, and has no number for layer {index}", MODEL)
        return float(entry)


class Attention(llama.NormedAttention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        hidden, heads, dim, ranks = args.hidden_size, args.heads(index), args.head_dim, mesh.tensor.size
        if heads % ranks:
            raise FatalError(
                f"--tp {ranks} does not divide the {heads} heads of layer {index}: choose a divisor", USAGE
            )
        if heads % args.num_key_value_heads:
            raise FatalError(
                f"config.json: {heads} heads cannot share {args.num_key_value_heads} key heads evenly", MODEL
            )
        self.qkv_proj = QKVParallel(hidden, heads, args.num_key_value_heads, dim, mesh, args.qkv_bias)
        self.g_proj = HeadGates(hidden, heads, mesh)
        self.o_proj = RowParallel(heads * dim, hidden, mesh, args.o_bias)

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        read = self.g_proj.around(h, batch, lambda: self.attention(h, q, k, v, cos_sin, batch, self.norms))
        return self.o_proj(read)


class Layer(llama.Layer):
    ATTENTION = Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        if isinstance(self.mlp, MoE):  # routed experts have limits of their own
            self.mlp.experts.activation = args.activation("swiglu_limits", index)


class Model(base.Model):
    LAYER = Layer
    RENAMED = {
        ".moe.gate.": ".mlp.gate.", ".moe.router_bias": ".mlp.gate.e_score_correction_bias",
        ".moe.": ".mlp.experts.", ".share_expert.": ".mlp.shared_experts.",
    }  # fmt: skip
