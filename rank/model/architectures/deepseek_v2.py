"""DeepSeek-V2 and V2-Lite, also Coder-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention and, behind the first
layers, experts, some of which all tokens visit."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from torch import nn

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.attention.attention import AttentionParams
from ....kernels.moe.router import RouterParams
from .. import base
from ..base import Count
from ..layers.feed_forward import Experts, FeedForward
from ..layers.linear import Linear
from ..layers.mla import LatentAttention, LatentSizes, LatentUp
from ..layers.rope import Parameters, yarn_mscale
from ..weights.slicing import ShardedModule, Source
from . import llama

# The part of a head that is rotated stands for the head where rotary embeddings are made.
CONFIG = {"names": {"qk_rope_head_dim": "head_dim"}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    kv_lora_rank: int
    q_lora_rank: int | None = 1536  # None: queries have no latent
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    first_k_dense_replace: int = 0
    moe_layer_freq: Count = 1
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.attention_bias and not self.q_lora_rank:
            raise FatalError("config.json: attention_bias without q_lora_rank is not supported", MODEL)
        self.check_router()

    def check_router(self) -> None:
        """Raises FatalError where experts are chosen in another way."""
        base.expect("scoring_func", self.scoring_func, "softmax")
        base.expect("topk_method", self.topk_method, "greedy", "group_limited_greedy")
        base.expect("norm_topk_prob", self.norm_topk_prob, False)

    @property
    def router(self) -> RouterParams:
        """Groups are as good as their best expert."""
        groups = (self.n_group, self.topk_group) if self.topk_method == "group_limited_greedy" else (1, 1)
        return RouterParams(
            self.num_experts_per_tok, normalise=False, scale=self.routed_scaling_factor, groups=groups[0],
            top_groups=groups[1], group_top=1,
        )  # fmt: skip

    @property
    def latent_sizes(self) -> LatentSizes:
        return LatentSizes(
            self.num_attention_heads, self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim,
            self.q_lora_rank or 0,
        )  # fmt: skip

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters | {"interleaved": True}

    def attention_params(self, index: int) -> AttentionParams:
        """YaRN's temperature (arXiv 2309.00071) is in the scale: once for queries and once for keys."""
        scale, rope = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5, self.rope_parameters
        if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
            if "factor" not in rope:
                raise FatalError(f"config.json: rope type {rope['rope_type']!r} needs 'factor'", MODEL)
            scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
        return AttentionParams(scale)

    def sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        return index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0

    def feed_forward(self, index: int) -> FeedForward:
        return feed_forward(self, index)


def feed_forward(args: Any, index: int) -> FeedForward:
    if not args.sparse(index):
        return llama.Args.feed_forward(args, index)
    inner = args.moe_intermediate_size
    return Experts(inner, args.n_routed_experts, args.router, args.hidden_act, inner * args.n_shared_experts)


class Attention(LatentAttention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        params = args.attention_params(index)
        super().__init__(args.hidden_size, args.latent_sizes, params, mesh, local, args.attention_bias)


class Layer(llama.Layer):
    ATTENTION: type[nn.Module] = Attention


class Model(base.Model):
    LAYER = Layer
    MERGED = base.Model.MERGED | {
        "q_kv_a_proj": ("q_proj", "kv_a_proj_with_mqa"),
        "q_a_kv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    }

    def _sources(self, path: str, linear: Linear | ShardedModule, stored: Container[str]) -> list[Source]:
        """GGUF files may have what makes keys and what makes values apart."""
        apart = [path.replace("kv_b_proj", one) for one in ("k_b_proj", "v_b_proj")]
        if isinstance(linear, LatentUp) and apart[0] in stored:
            return [Source(one) for one in apart]
        return super()._sources(path, linear, stored)
