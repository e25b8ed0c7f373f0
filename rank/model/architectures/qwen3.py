"""Qwen3, dense (Yang et al. 2025, arXiv 2505.09388): Llama with QK norm."""

from __future__ import annotations

from dataclasses import dataclass

from ....comm.mesh import Mesh
from ....kernels.rope.rope import CosSin, QKNorm
from ..batch import Batch
from ..layers.norm import RMSNorm
from ..layers.residual import Normed, Partial
from . import llama, qwen2

CONFIG = {"defaults": {"head_dim": 128}}


@dataclass(frozen=True, kw_only=True)
class Args(qwen2.Args):
    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def o_bias(self) -> bool:
        return self.attention_bias


class Attention(llama.Attention):
    def __init__(self, args: llama.Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.q_norm = RMSNorm(args.head_dim, args.rms_norm_eps, args.norm_offset)
        self.k_norm = RMSNorm(args.head_dim, args.rms_norm_eps, args.norm_offset)

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        norms = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch, norms))


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(llama.Model):
    LAYER = Layer
