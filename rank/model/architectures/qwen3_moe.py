"""Qwen3 with experts: 30B-A3B, 235B-A22B (Yang et al. 2025, arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....comm.mesh import Mesh
from .. import base
from ..config import SLIDING
from ..formats._stacks import APART, ExpertLayout
from ..layers.moe import MoE
from . import qwen3
from .qwen2_moe import ExpertArgs


@dataclass(frozen=True, kw_only=True)
class Args(ExpertArgs, qwen3.Args):
    def layer_type(self, index: int) -> str:
        """All layers slide where one does: max_window_layers and layer_types have no effect."""
        return SLIDING


class Layer(qwen3.Layer):
    LAYOUT: ClassVar[ExpertLayout] = APART  # of experts' tensors

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        if args.sparse(index):
            hidden, inner = args.hidden_size, args.moe_intermediate_size
            self.mlp = MoE(hidden, inner, args.experts, args.router, mesh, args.hidden_act, self.LAYOUT)


class Model(base.Model):
    LAYER = Layer
