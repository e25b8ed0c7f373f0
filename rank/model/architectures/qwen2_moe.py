"""Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al. 2024, arXiv 2407.10671): Qwen2 with experts, one of which all tokens
visit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ....comm.mesh import Mesh
from ....kernels.activation.activation import scale_by_gate, scale_by_sigmoid
from ....kernels.moe.router import RouterParams
from .. import base
from ..base import Count
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.linear import ColumnParallel
from ..layers.mlp import GatedMLP
from ..layers.moe import MoE
from ..layers.residual import Normed, Partial
from ..shard import whole
from . import llama, qwen2


@dataclass(frozen=True, kw_only=True)
class ExpertArgs:
    """Which layers have experts, and which."""

    num_experts: int = 0
    num_local_experts: int = 0  # the same by another name
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] = field(default_factory=list)

    @property
    def experts(self) -> int:
        return self.num_experts or self.num_local_experts

    @property
    def router(self) -> RouterParams:
        return RouterParams(self.num_experts_per_tok, normalise=self.norm_topk_prob)

    def sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        return self.experts > 0 and index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True, kw_only=True)
class SharedExpertArgs(ExpertArgs):
    shared_expert_intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class Args(SharedExpertArgs, qwen2.Args):
    qkv_bias: bool = True

    def layer_type(self, index: int) -> str:
        """Every other layer slides, below max_window_layers; in Qwen2 all of them do, from there on."""
        slides = index % 2 == 0 and index < self.max_window_layers
        return layer_type(self.layer_types, index, SLIDING if slides else FULL)


class SharedMoEArgs(Protocol):
    """The arguments that SharedMoE reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def shared_expert_intermediate_size(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def router(self) -> RouterParams: ...
    @property
    def hidden_act(self) -> str: ...


class SharedMoE(MoE):
    """With an expert that all tokens visit, weighted by a sigmoid of its own."""

    def __init__(self, args: SharedMoEArgs, mesh: Mesh):
        hidden, inner, act = args.hidden_size, args.moe_intermediate_size, args.hidden_act
        super().__init__(hidden, inner, args.experts, args.router, mesh, act)
        self.shared_expert = GatedMLP(hidden, args.shared_expert_intermediate_size, mesh, act)
        self.shared_expert_gate = ColumnParallel(whole(hidden), (whole(1),), bias=False)

    def forward(self, h: Normed | Tensor) -> Partial:
        x = h.tensor() if isinstance(h, Normed) else h
        inner = self.shared_expert.gate_up_proj(x)
        gate = self.shared_expert_gate.matrix if x.is_cuda else None
        inner = scale_by_sigmoid(inner, self.shared_expert_gate(x)) if gate is None else scale_by_gate(inner, x, gate)
        return super().forward(x) + self.shared_expert.down_proj(inner)


class Layer(llama.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        if args.sparse(index):
            self.mlp = SharedMoE(args, mesh)


class Model(base.Model):
    LAYER = Layer
