"""Llama 4, text (Meta 2025): layers that rotate and attend within chunks of tokens, to each a layer of full attention
without positions, and experts, one for each token and one that all visit, in all layers or some."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ....comm.mesh import Mesh
from ....kernels.moe.router import RouterParams
from ....kernels.rope.rope import QKNorm
from .. import base
from ..base import Count
from ..cache_spec import PagedKV
from ..config import FULL
from ..experts.fused import ExpertLayout
from ..layers.attention import PagedAttention, layer_type
from ..layers.feed_forward import Dense, Experts, FeedForward
from ..layers.mlp import GatedMLP
from ..layers.moe import MoE
from ..layers.norm import Ones
from ..layers.residual import Normed, Partial
from ..layers.rope import NONE, Parameters
from . import llama, smollm3

CONFIG = {"defaults": {"head_dim": 128, "rope_theta": 500000.0}}
CHUNKED = "chunked_attention"  # a layer's type in config.json's layer_types
RECORDED = 512  # tokens: no recorded step of a CPU has more, and few captured ones


@dataclass(frozen=True, kw_only=True)
class Args(smollm3.Args):
    intermediate_size_mlp: int = 16384  # of layers without experts
    num_local_experts: Count = 16
    num_experts_per_tok: int = 1
    interleave_moe_layer_step: Count = 1
    moe_layers: list[int] | None = None
    use_qk_norm: bool = True
    attention_chunk_size: Count | None = 8192
    attn_temperature_tuning: bool | int = True
    floor_scale: Count = 8192
    attn_scale: float = 0.1
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        base.expect("num_experts_per_tok", self.num_experts_per_tok, 1)

    def chunk(self, index: int) -> int:
        """Tokens of a layer's chunks; 0: it attends to all."""
        kind = layer_type(self.layer_types, index, CHUNKED if self.rotates(index) else FULL, (FULL, CHUNKED))
        return self.attention_chunk_size or 0 if kind == CHUNKED else 0

    def window(self, index: int) -> int:
        return 0

    def rope(self, index: int) -> Parameters:
        if self.rotates(index):
            return self.rope_parameters | {"interleaved": True}
        if not self.attn_temperature_tuning:
            return NONE
        scaling = {"llama_4_scaling_beta": self.attn_scale, "original_max_position_embeddings": self.floor_scale}
        return NONE | scaling | {"temperature_start": -1}

    def sparse(self, index: int) -> bool:
        if self.moe_layers is not None:
            return index in self.moe_layers
        return (index + 1) % self.interleave_moe_layer_step == 0

    def feed_forward(self, index: int) -> FeedForward:
        if not self.sparse(index):
            return Dense(self.intermediate_size_mlp, self.hidden_act)
        params, layout = RouterParams(1, "sigmoid", normalise=False), ExpertLayout("eio")
        return ScaledExperts(self.intermediate_size, self.num_local_experts, params, self.hidden_act, layout=layout)


class Attention(llama.Attention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.attention = PagedAttention(local, args.attention_params(index), chunk=args.chunk(index))
        self.eps = args.rms_norm_eps
        self.norm = Ones(args.head_dim) if args.use_qk_norm and args.rotates(index) else None

    def cache_spec(self) -> PagedKV:
        chunk = self.attention.chunk
        return replace(super().cache_spec(), window=chunk, chunked=chunk > 0)

    @property
    def norms(self) -> QKNorm | None:
        """Without a weight a norm before the rotation is the same as behind it."""
        return None if self.norm is None else QKNorm(self.norm.weight, self.norm.weight, self.eps)


class ScaledMoE(MoE):
    """An expert of each token reads it times its weight, and one that all tokens visit reads it as it is."""

    def __init__(self, hidden: int, of: Experts, mesh: Mesh):
        super().__init__(hidden, of.inner, of.experts, of.router, mesh, of.act, of.layout)
        self.shared_expert = GatedMLP(hidden, of.inner, mesh, of.act)
        self.ones = Ones(RECORDED, 1, dtype=torch.float32)

    def forward(self, h: Normed) -> Partial:  # type: ignore[override]
        x = h.tensor()
        ids, weights = self.gate(x)
        scaled = x.clone(memory_format=torch.contiguous_format).mul_(weights)
        ones = self.ones.weight[: len(x)] if len(x) <= RECORDED else torch.ones_like(weights)
        return self.experts(scaled, ids, ones) + self.shared_expert(x)


class ScaledExperts(Experts):
    def make(self, hidden: int, mesh: Mesh) -> ScaledMoE:
        return ScaledMoE(hidden, self, mesh)


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(base.Model):
    LAYER = Layer
    RENAMED = {".feed_forward.": ".mlp.", ".mlp.router.": ".mlp.gate."}
