"""Hunyuan, dense: 0.5B to 7B (Tencent 2025): Llama with a norm of each head's query and key behind the rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....comm.mesh import Mesh
from ....kernels.norm.norm import rms_norm
from ....kernels.rope.rope import CosSin, apply_rotary
from .. import base
from ..batch import Batch
from ..layers.norm import RMSNorm
from ..layers.residual import Normed, Partial
from ..layers.rope import Parameters
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5

    def rope(self, index: int) -> Parameters:
        """Rope of a layer. `dynamic` in these checkpoints stretches the base by a fixed alpha."""
        rope, dim = self.rope_parameters, self.head_dim
        if rope["rope_type"] != "dynamic" or not (alpha := rope.get("alpha")):
            return rope
        return {"rope_type": "default", "rope_theta": rope["rope_theta"] * alpha ** (dim / (dim - 2))}


class Attention(llama.Attention):
    def __init__(self, args: llama.Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.q_norm = RMSNorm(args.head_dim, args.rms_norm_eps)
        self.k_norm = RMSNorm(args.head_dim, args.rms_norm_eps)

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        """Rotate before the norm; the kernel that stores keys then rotates by no angle."""
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        q, k = (
            rms_norm(apply_rotary(x, cos_sin), norm.weight, norm.eps)
            for x, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        still = CosSin(torch.ones_like(cos_sin.cos), torch.zeros_like(cos_sin.sin))
        return self.o_proj(self.attention(h, q, k, v, still, batch))


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(base.Model):
    LAYER = Layer
    RENAMED = {".self_attn.query_layernorm.": ".self_attn.q_norm.", ".self_attn.key_layernorm.": ".self_attn.k_norm."}
