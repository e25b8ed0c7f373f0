"""Arcee's AFM (Arcee AI 2025): Llama with an MLP that has no gate and squares its ReLU."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from .. import base
from ..layers.mlp import MLP
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-5


class Layer(llama.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.mlp = MLP(args.hidden_size, args.intermediate_size, mesh, args.hidden_act, args.mlp_bias)


class Model(base.Model):
    LAYER = Layer
