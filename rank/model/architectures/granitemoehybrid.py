"""Granite 4 (IBM 2025): Granite with Mamba-2 in most layers, attention that is not rotated in the others, and a
feed-forward layer that all tokens visit, with experts or alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count
from ..batch import Batch
from ..config import FULL, LINEAR
from ..layers import mamba2
from ..layers.attention import layer_type
from ..layers.feed_forward import Dense, Experts, FeedForward
from ..layers.mamba2 import Mamba2, Mamba2Shape
from ..layers.residual import Normed, Partial
from ..layers.rope import NONE, Parameters
from . import granite, granitemoe, llama

CONFIG = {"names": {"layers_block_type": "layer_types"}}
KINDS = {"mamba": LINEAR, "attention": FULL}  # as the first checkpoints name types of layers


@dataclass(frozen=True, kw_only=True)
class Args(granite.Args):
    intermediate_size: int = 11008  # of an expert
    shared_intermediate_size: int = 1024
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    position_embedding_type: str | None = None
    layer_types: list[str] = field(default_factory=list)
    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Count = 256
    mamba_d_head: int | str = "auto"
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: Any = None

    def __post_init__(self) -> None:
        mamba2.check_time_steps(self.time_step_limit)
        base.expect("hidden_act", self.hidden_act, "silu")
        inner = self.mamba_expand * self.hidden_size
        base.expect("mamba_d_head", self.mamba_d_head, "auto", inner // self.mamba_n_heads)

    def linear(self, index: int) -> bool:
        kind = layer_type(self.layer_types, index, LINEAR, (FULL, LINEAR, *KINDS))
        return KINDS.get(kind, kind) == LINEAR

    def feed_forward(self, index: int) -> FeedForward:
        shared, experts = self.shared_intermediate_size, self.num_local_experts
        if not experts:
            return Alone(shared, self.hidden_act)
        return Experts(self.intermediate_size, experts, RouterParams(self.num_experts_per_tok), self.hidden_act, shared)

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters if self.position_embedding_type == "rope" else NONE

    @property
    def mamba(self) -> Mamba2Shape:
        return Mamba2Shape(
            self.mamba_n_heads, self.mamba_expand * self.hidden_size // self.mamba_n_heads, self.mamba_n_groups,
            self.mamba_d_state, self.mamba_d_conv, self.mamba_conv_bias, self.mamba_proj_bias,
        )  # fmt: skip


class SharedAlone(nn.Module):
    """The feed-forward layer of models without experts, where those with experts have it."""

    def __init__(self, shared: nn.Module):
        super().__init__()
        self.shared_experts = shared

    def forward(self, h: Normed) -> Partial:
        return self.shared_experts(h)


class Alone(Dense):
    def make(self, hidden: int, mesh: Mesh) -> SharedAlone:
        return SharedAlone(super().make(hidden, mesh))


class Layer(llama.Layer):
    def make_mixer(self, args: Args, mesh: Mesh, index: int, local: int) -> None:
        of = args.hidden_size, args.mamba, args.rms_norm_eps, mesh, local
        self.mamba = Mamba2(*of) if args.linear(index) else None
        if self.mamba is None:
            super().make_mixer(args, mesh, index, local)

    def mix(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        return super().mix(h, cos_sin, batch) if self.mamba is None else self.mamba(h, batch)


class Model(base.Model):
    LAYER = Layer
    RENAMED = (
        mamba2.RENAMED
        | granitemoe.Model.RENAMED
        | {
            ".shared_mlp.input_linear.": ".mlp.shared_experts.gate_up_proj.",
            ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
        }
    )
