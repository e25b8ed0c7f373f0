"""Feed-forward parts of layers, as Args describe them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import nn

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from ..formats._stacks import APART, ExpertLayout
from .mlp import MLP, GatedMLP
from .moe import MoE, SharedMoE


class FeedForward(Protocol):
    def make(self, hidden: int, mesh: Mesh) -> nn.Module: ...


class Dense(NamedTuple):
    """An MLP."""

    inner: int
    act: str  # the activation's name in config.json
    bias: bool = False
    gated: bool = True

    def make(self, hidden: int, mesh: Mesh) -> nn.Module:
        kind = GatedMLP if self.gated else MLP
        return kind(hidden, self.inner, mesh, self.act, self.bias)


class Experts(NamedTuple):
    """Experts, some of which all tokens may visit."""

    inner: int  # of one
    experts: int
    router: RouterParams
    act: str
    shared: int = 0  # inner size of those that all tokens visit, together
    layout: ExpertLayout = APART  # of the experts' tensors, where all are routed

    def make(self, hidden: int, mesh: Mesh) -> nn.Module:
        if self.shared:
            return SharedMoE(hidden, self.inner, self.shared, self.experts, self.router, mesh, self.act)
        return MoE(hidden, self.inner, self.experts, self.router, mesh, self.act, self.layout)
