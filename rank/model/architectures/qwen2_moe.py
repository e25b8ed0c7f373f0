"""Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al. 2024, arXiv 2407.10671): Qwen2 with experts, one of which all tokens
visit."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ....comm.mesh import Mesh
from ....kernels.activation.activation import scale_by_gate, scale_by_sigmoid
from ....kernels.moe.router import RouterParams
from ..base import Count
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.feed_forward import Experts, FeedForward
from ..layers.linear import ColumnParallel
from ..layers.mlp import GatedMLP
from ..layers.moe import MoE
from ..layers.residual import Normed, Partial
from ..shard import whole
from . import llama, qwen2


@dataclass(frozen=True, kw_only=True)
class ExpertArgs(llama.Args):
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

    def feed_forward(self, index: int) -> FeedForward:
        if not self.sparse(index):
            return super().feed_forward(index)
        return Experts(self.moe_intermediate_size, self.experts, self.router, self.hidden_act)


class WeightedExperts(Experts):
    def make(self, hidden: int, mesh: Mesh) -> SharedMoE:
        return SharedMoE(hidden, self, mesh)


@dataclass(frozen=True, kw_only=True)
class SharedExpertArgs(ExpertArgs):
    shared_expert_intermediate_size: int

    def feed_forward(self, index: int) -> FeedForward:
        made = super().feed_forward(index)
        shared = self.shared_expert_intermediate_size
        return WeightedExperts(*made._replace(shared=shared)) if isinstance(made, Experts) else made


@dataclass(frozen=True, kw_only=True)
class Args(SharedExpertArgs, qwen2.Args):
    qkv_bias: bool = True

    def layer_type(self, index: int) -> str:
        """Every other layer slides, below max_window_layers; in Qwen2 all of them do, from there on."""
        slides = index % 2 == 0 and index < self.max_window_layers
        return layer_type(self.layer_types, index, SLIDING if slides else FULL)


class SharedMoE(MoE):
    """With an expert that all tokens visit, weighted by a sigmoid of its own."""

    def __init__(self, hidden: int, of: Experts, mesh: Mesh):
        super().__init__(hidden, of.inner, of.experts, of.router, mesh, of.act)
        self.shared_expert = GatedMLP(hidden, of.shared, mesh, of.act)
        self.shared_expert_gate = ColumnParallel(whole(hidden), (whole(1),), bias=False)

    def forward(self, h: Normed | Tensor) -> Partial:
        x = h.tensor() if isinstance(h, Normed) else h
        inner = self.shared_expert.gate_up_proj(x)
        gate = self.shared_expert_gate.matrix if x.is_cuda else None
        inner = scale_by_sigmoid(inner, self.shared_expert_gate(x)) if gate is None else scale_by_gate(inner, x, gate)
        return super().forward(x) + self.shared_expert.down_proj(inner)


Model = llama.Model
