"""DeepSeek-V3.2 and V3.2-Exp (DeepSeek-AI 2025): DeepSeek-V3 whose attention reads the tokens that an indexer
chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ..base import Count
from ..layers.indexer import IndexedLatentAttention, IndexSizes
from ..layers.rope import Parameters
from . import deepseek_v2, deepseek_v3, glm4_moe_lite

CONFIG = {"names": {"qk_rope_head_dim": "head_dim"}}


@dataclass(frozen=True, kw_only=True)
class Args(glm4_moe_lite.Args):
    rms_norm_eps: float = 1e-6
    q_lora_rank: Count = 1536
    n_group: Count = 8
    topk_group: Count = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    index_n_heads: Count = 64
    index_head_dim: Count = 128
    index_topk: Count = 2048

    INTERLEAVED: ClassVar[bool] = False  # how index queries and keys are rotated, whatever latents are

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index_head_dim < self.qk_rope_head_dim:
            raise FatalError(
                f"config.json: index_head_dim {self.index_head_dim} is less than qk_rope_head_dim "
                f"{self.qk_rope_head_dim}, the part of an index key that is rotated",
                MODEL,
            )

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters | {"interleaved": True}

    def has_indexer(self, index: int) -> bool:
        return True


class Attention(IndexedLatentAttention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        sizes = IndexSizes(args.index_n_heads, args.index_head_dim, args.index_topk, args.INTERLEAVED)
        super().__init__(
            args.hidden_size, args.latent_sizes, args.attention_params(index), mesh, local, args.attention_bias, sizes,
            args.has_indexer(index),
        )  # fmt: skip


class Layer(deepseek_v2.Layer):
    ATTENTION = Attention


class Model(deepseek_v3.Model):
    LAYER = Layer
    MERGED = deepseek_v3.Model.MERGED | {"wk_weights_proj": ("wk", "weights_proj")}
