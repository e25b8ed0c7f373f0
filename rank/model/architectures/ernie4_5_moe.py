"""ERNIE 4.5 with experts: 21B-A3B, 300B-A47B (Baidu 2025): ERNIE 4.5 with experts in most layers, chosen by a softmax
with a bias that is for the choice alone, and some that all tokens visit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams, route
from .. import base
from ..base import Count
from ..layers.feed_forward import Experts, FeedForward
from ..layers.moe import Router
from ..weights.slicing import Field, parameter
from . import ernie4_5, llama

CONFIG = {
    "names": {"use_bias": "mlp_bias", "moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts"},
    "defaults": {"rope_theta": 500000.0},
}


@dataclass(frozen=True, kw_only=True)
class Args(ernie4_5.Args):
    moe_intermediate_size: int = 1536
    num_experts: int = 64
    num_experts_per_tok: int = 6
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: float | None = None  # a whole number, also -1: the last layer
    moe_layer_interval: Count = 1
    moe_norm_min: float = 1e-12  # by which weights are divided at least

    def __post_init__(self) -> None:
        base.expect("use_bias", self.mlp_bias, False)
        base.expect("moe_norm_min", self.moe_norm_min, 1e-12)

    def sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        given, last = self.moe_layer_end_index, self.num_hidden_layers - 1
        end = last if given is None or given == -1 else given
        return (index + 1) % self.moe_layer_interval == 0 and self.moe_layer_start_index <= index <= end

    def feed_forward(self, index: int) -> FeedForward:
        if not self.sparse(index):
            return super().feed_forward(index)
        inner, params = self.moe_intermediate_size, RouterParams(self.num_experts_per_tok, corrected=True)
        shared = inner * self.moe_num_shared_experts
        return CorrectedExperts(inner, self.num_experts, params, self.hidden_act, shared)


class CorrectedRouter(Router):
    """A router whose checkpoints hold the bias as a row."""

    fields = Router.fields[0], Field("e_score_correction_bias", "bo", torch.float32), Router.fields[2]

    def __init__(self, hidden: int, experts: int, params: RouterParams):
        super().__init__(hidden, experts, params)
        self.e_score_correction_bias = parameter(1, experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.e_score_correction_bias is not None
        return route(x, self.weight, self.e_score_correction_bias[0], self.params)


class CorrectedExperts(Experts):
    def make(self, hidden: int, mesh: Mesh) -> nn.Module:
        made = super().make(hidden, mesh)
        made.gate = CorrectedRouter(hidden, self.experts, self.router)
        return made


class Model(llama.Model):
    RENAMED = {".gate.moe_statics.": ".gate.", ".mlp.moe_statics.": ".mlp.gate."}
