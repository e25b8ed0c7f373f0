"""Falcon-H1 (TII 2025, arXiv 2507.22448): attention and Mamba-2 side by side on one norm, with multipliers on what each
reads and makes."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.activation.activation import gated_activation
from ....kernels.attention.attention import AttentionParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count, Divisor
from ..batch import Batch
from ..cache_spec import KVAndState
from ..layers import mamba2
from ..layers.mamba2 import Factors, Mamba2, Mamba2Shape
from ..layers.mlp import GatedMLP
from ..layers.residual import Normed, Partial, ResidualStream
from . import llama

CONFIG = {"names": {"embedding_multiplier": "embed_scale", "lm_head_multiplier": "logit_scale"}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    mamba_d_ssm: int | None = 1024
    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Count = 256
    mamba_d_head: int | str = "auto"
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    projectors_bias: bool = False
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    mlp_multipliers: list[float] = field(default_factory=lambda: [1.0] * 2)  # of the gate and of what the layer makes
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_multipliers: list[float] = field(default_factory=lambda: [1.0] * 5)  # of z, x, keys, queries and time steps
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: Divisor = 1.0
    time_step_limit: Any = None

    def __post_init__(self) -> None:
        for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            if len(given := getattr(self, key)) != count:
                raise FatalError(f"config.json: {key} is {given}, expected {count} numbers", MODEL)
        mamba2.check_time_steps(self.time_step_limit)
        base.expect("hidden_act", self.hidden_act, "silu")
        for key in ("attention_bias", "mamba_proj_bias", "projectors_bias"):
            base.expect(key, getattr(self, key), False)
        base.expect("mamba_d_head", self.mamba_d_head, "auto", self.mamba.head_dim)

    def attention_params(self, index: int) -> AttentionParams:
        """The multipliers of queries and keys are in the scale."""
        return AttentionParams(self.head_dim**-0.5 * self.attention_in_multiplier**2 * self.key_multiplier)

    @property
    def mamba(self) -> Mamba2Shape:
        inner = self.mamba_expand * self.hidden_size if self.mamba_d_ssm is None else self.mamba_d_ssm
        return Mamba2Shape(
            self.mamba_n_heads, inner // self.mamba_n_heads, self.mamba_n_groups, self.mamba_d_state, self.mamba_d_conv,
            self.mamba_conv_bias, normed=self.mamba_rms_norm, gate_first=not self.mamba_norm_before_gate,
        )  # fmt: skip


class Attention(llama.Attention):
    """Its output is scaled so that Mamba-2's multiplier is right for the sum of both."""

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        factor = args.attention_in_multiplier * args.attention_out_multiplier / args.ssm_out_multiplier
        self.factors = Factors((factor, self.o_proj.inputs.width))

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        return self.o_proj(self.factors(self.attention(h, q, k, v, cos_sin, batch)))


class MLP(GatedMLP):
    """With a multiplier on the gate before it is activated."""

    def __init__(self, args: Args, mesh: Mesh, gate: float):
        super().__init__(args.hidden_size, args.intermediate_size, mesh, args.hidden_act, args.mlp_bias)
        width = self.down_proj.inputs.width
        self.factors = Factors((gate, width), (1.0, width))

    def forward(self, h: Normed | Tensor) -> Partial:
        x = h.tensor() if isinstance(h, Normed) else h
        both = self.factors(self.gate_up_proj.multiply(x))
        return self.down_proj(gated_activation(both, self.gate_up_proj.activation))


class Layer(llama.Layer):
    ATTENTION = Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        factors = [args.ssm_in_multiplier * one for one in args.ssm_multipliers]
        self.mamba = Mamba2(args.hidden_size, args.mamba, args.rms_norm_eps, mesh, local, factors)
        gate, self.mlp_multiplier = args.mlp_multipliers
        self.mlp = MLP(args, mesh, gate)
        self.multiplier = args.ssm_out_multiplier

    def cache_spec(self) -> KVAndState:
        return KVAndState(self.self_attn.cache_spec(), self.mamba.cache_spec())

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        """Mamba-2 reads the norm first, as attention may reduce it to sampled rows."""
        yield (h := self.input_layernorm(stream))
        y, z = self.mamba.mix(h, batch)
        attended = self.self_attn(h, cos_sin, batch)
        y, z = (batch.rows_like(attended, one) for one in (y, z))
        stream.add((self.mamba.out(y, z) + attended) * self.multiplier)
        yield (h := self.post_attention_layernorm(stream))
        stream.add(self.mlp(h) * self.mlp_multiplier)


class Model(base.Model):
    LAYER = Layer
    RENAMED = mamba2.RENAMED | {
        "model.final_layernorm.": "model.norm.",
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        ".feed_forward.": ".mlp.",
    }
