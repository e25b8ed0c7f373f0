"""Granite 4 (IBM 2025): Granite with Mamba-2 in most layers, attention that is not rotated in the others, and a
feed-forward layer that all tokens visit, with experts or alone."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

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
from ..layers.mamba2 import Mamba2, Mamba2Shape
from ..layers.mlp import GatedMLP
from ..layers.moe import SharedMoE
from ..layers.norm import AddRMSNorm
from ..layers.residual import Normed, Partial, ResidualStream
from ..layers.rope import NONE, Parameters
from . import granite, llama

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

    def __post_init__(self) -> None:
        base.expect("hidden_act", self.hidden_act, "silu")
        inner = self.mamba_expand * self.hidden_size
        base.expect("mamba_d_head", self.mamba_d_head, "auto", inner // self.mamba_n_heads)

    def linear(self, index: int) -> bool:
        """Whether a layer has Mamba-2."""
        kind = layer_type(self.layer_types, index, LINEAR, (FULL, LINEAR, *KINDS))
        return KINDS.get(kind, kind) == LINEAR

    @property
    def draft_layer(self) -> int:
        full = (index for index in reversed(range(self.num_hidden_layers)) if not self.linear(index))
        return next(full, self.num_hidden_layers - 1)

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

    def __init__(self, args: Args, mesh: Mesh):
        super().__init__()
        self.shared_experts = GatedMLP(args.hidden_size, args.shared_intermediate_size, mesh, args.hidden_act)

    def forward(self, h: Normed) -> Partial:
        return self.shared_experts(h)


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        hidden, eps, self.multiplier = args.hidden_size, args.rms_norm_eps, args.residual_multiplier
        self.input_layernorm = AddRMSNorm(hidden, eps)
        if args.linear(index):
            self.mamba = Mamba2(hidden, args.mamba, eps, mesh, local)
        else:
            self.self_attn = llama.Attention(args, mesh, index, local)
        self.post_attention_layernorm = AddRMSNorm(hidden, eps)
        self.mlp: nn.Module
        if args.num_local_experts:
            inner, shared, experts = args.intermediate_size, args.shared_intermediate_size, args.num_local_experts
            self.mlp = SharedMoE(hidden, inner, shared, experts, RouterParams(args.num_experts_per_tok), mesh)
        else:
            self.mlp = SharedAlone(args, mesh)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        mixed = self.mamba(h, batch) if hasattr(self, "mamba") else self.self_attn(h, cos_sin, batch)
        stream.add(mixed * self.multiplier)
        yield (h := self.post_attention_layernorm(stream))
        stream.add(self.mlp(h) * self.multiplier)


class Model(base.Model):
    LAYER = Layer
    RENAMED = mamba2.RENAMED | {
        ".block_sparse_moe.router.layer.": ".mlp.gate.",
        ".block_sparse_moe.router.": ".mlp.gate.",
        ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
        ".block_sparse_moe.": ".mlp.",
        ".shared_mlp.input_linear.": ".mlp.shared_experts.gate_up_proj.",
        ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
    }
