"""Qwen3-Next (Qwen team 2025): three layers of a gated delta net (arXiv 2412.06464) to one of gated attention (Qiu et
al. 2025, arXiv 2505.06708), and experts, one of which all tokens visit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....comm.mesh import Mesh
from ....kernels.activation.activation import sigmoid_gate
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count
from ..batch import Batch
from ..config import FULL, LINEAR
from ..layers.attention import layer_type
from ..layers.gated_delta_net import DeltaNetShape, GatedDeltaNet, GroupedDeltaNet
from ..layers.linear import QKVParallel
from ..layers.residual import Normed, Partial
from . import llama
from .qwen2_moe import SharedExpertArgs

CONFIG = {"defaults": {"head_dim": 256, "partial_rotary_factor": 0.25}}


@dataclass(frozen=True, kw_only=True)
class HybridArgs(llama.Args):
    """Which layers have a gated delta net, and which."""

    norm_offset: ClassVar[float] = 1.0

    full_attention_interval: Count = 4
    layer_types: list[str] = field(default_factory=list)
    linear_conv_kernel_dim: Count = 4
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    attn_output_gate: bool = True

    def __post_init__(self) -> None:
        base.expect("hidden_act", self.hidden_act, "silu")
        base.expect("attn_output_gate", self.attn_output_gate, True)

    def linear(self, index: int) -> bool:
        usual = LINEAR if (index + 1) % self.full_attention_interval else FULL
        return layer_type(self.layer_types, index, usual, (FULL, LINEAR)) == LINEAR

    @property
    def delta_net(self) -> DeltaNetShape:
        return DeltaNetShape(
            self.linear_num_key_heads, self.linear_num_value_heads, self.linear_key_head_dim,
            self.linear_value_head_dim, self.linear_conv_kernel_dim,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(SharedExpertArgs, HybridArgs):
    norm_topk_prob: bool = True


class Attention(llama.NormedAttention):
    """The query's linear has a gate after each head's query; the gate's sigmoid scales what the head reads."""

    def __init__(self, args: HybridArgs, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        heads, dim = args.num_attention_heads, args.head_dim
        self.qkv_proj = QKVParallel(
            args.hidden_size, heads, args.num_key_value_heads, dim, mesh, args.qkv_bias, gated=True
        )

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, gate, k, v = self.qkv_proj.split_gated(self.qkv_proj(h))
        out = self.attention(h, q, k, v, cos_sin, batch, self.norms)
        return self.o_proj(sigmoid_gate(out, batch.rows_like(out, gate)))


class Layer(llama.Layer):
    ATTENTION = Attention
    DELTA_NET: type[GatedDeltaNet] = GroupedDeltaNet

    def make_mixer(self, args: HybridArgs, mesh: Mesh, index: int, local: int) -> None:
        of = args.hidden_size, args.delta_net, args.rms_norm_eps, mesh, local
        self.linear_attn = self.DELTA_NET(*of) if args.linear(index) else None
        if self.linear_attn is None:
            super().make_mixer(args, mesh, index, local)

    def mix(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        return super().mix(h, cos_sin, batch) if self.linear_attn is None else self.linear_attn(h, batch)


class Model(base.Model):
    LAYER = Layer
    RENAMED = {f"linear_attn.{name}": f"linear_attn.decay.{name}" for name in ("A_log", "dt_bias")}
