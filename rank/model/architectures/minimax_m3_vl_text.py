"""MiniMax-M3, text (MiniMax 2026, arXiv 2606.13392): attention to the blocks of tokens that an indexer chooses for each
key head, QK norm of each head, and experts with a clamped SwiGLU behind dense layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.activation.activation import CLAMPED_SWIGLU, LIMIT, SLOPE
from ....kernels.attention.block_sparse import Blocks
from ....kernels.moe.router import RouterParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count
from ..batch import Batch
from ..cache_spec import CacheSpec, Indexed, PagedLatent
from ..config import FULL
from ..layers.attention import layer_type
from ..layers.block_sparse import BlockIndexer, BlockSparseAttention
from ..layers.feed_forward import Dense, Experts, FeedForward
from ..layers.mlp import limited
from ..layers.residual import Normed, Partial
from . import glm4_moe_lite, llama, minimax_m2

SPARSE = "minimax_m3_sparse"
CONFIG = {
    "names": {
        "sparse_attention_config.sparse_num_index_heads": "index_n_heads",
        "sparse_attention_config.sparse_index_dim": "index_head_dim",
        "sparse_attention_config.sparse_block_size": "index_block_size",
        "sparse_attention_config.sparse_topk_blocks": "index_topk_blocks",
        "sparse_attention_config.sparse_local_block": "index_local_blocks",
        "sparse_attention_config.sparse_init_block": "sparse_init_block",
        "sparse_attention_config.sparse_score_type": "sparse_score_type",
        "sparse_attention_config.sparse_attention_freq": "sparse_attention_freq",
    },
    "defaults": {"rope_theta": 5000000.0, "head_dim": 128},
}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    intermediate_size: Count = 3072
    dense_intermediate_size: Count = 12288
    shared_intermediate_size: Count = 3072
    num_local_experts: Count = 128
    num_experts_per_tok: Count = 4
    routed_scaling_factor: float = 2.0
    swiglu_alpha: float = SLOPE
    swiglu_limit: float = LIMIT
    scoring_func: str = "sigmoid"
    use_routing_bias: bool = True
    qk_norm_type: str = "per_head"
    use_gemma_norm: bool = True
    mlp_layer_types: list[str] = field(default_factory=list)
    moe_layer_freq: list[int] = field(default_factory=list)  # of each layer: whether it has experts
    layer_types: list[str] = field(default_factory=list)
    sparse_attention_freq: list[int] = field(default_factory=list)  # of each layer: whether it chooses blocks
    sparse_init_block: int = 0  # first blocks that are always read
    sparse_score_type: str = "max"
    index_n_heads: Count = 4
    index_head_dim: Count = 128
    index_block_size: Count = 128
    index_topk_blocks: Count = 16
    index_local_blocks: int = 1

    norm_offset: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        limited(CLAMPED_SWIGLU, self.swiglu_limit)
        base.expect("hidden_act", self.hidden_act, "silu", "swigluoai")
        object.__setattr__(self, "hidden_act", "silu")  # transformers' name for what is clamped all the same
        base.expect("swiglu_alpha", self.swiglu_alpha, SLOPE)
        base.expect("scoring_func", self.scoring_func, "sigmoid")
        base.expect("use_routing_bias", self.use_routing_bias, True)
        base.expect("qk_norm_type", self.qk_norm_type, "per_head")
        base.expect("use_gemma_norm", self.use_gemma_norm, True)
        if not any(self.has_indexer(i) for i in range(self.num_hidden_layers)):
            return
        base.expect("sparse_init_block", self.sparse_init_block, 0)
        base.expect("sparse_score_type", self.sparse_score_type, "max")
        base.expect("index_n_heads", self.index_n_heads, self.num_key_value_heads)
        base.expect("index_local_blocks", self.index_local_blocks, *range(1, self.index_topk_blocks + 1))
        if self.index_head_dim < self.rotated:
            raise FatalError(
                f"config.json: index_head_dim {self.index_head_dim} is less than the {self.rotated} elements of a head "
                "that are rotated",
                MODEL,
            )

    @property
    def rotated(self) -> int:
        return int(self.head_dim * self.rope_parameters.get("partial_rotary_factor", 1.0))

    def has_indexer(self, index: int) -> bool:
        """Whether a layer's attention chooses blocks."""
        usual = SPARSE if any(self.sparse_attention_freq[index : index + 1]) else FULL
        return layer_type(self.layer_types, index, usual, (FULL, SPARSE)) == SPARSE

    def feed_forward(self, index: int) -> FeedForward:
        usual = not self.moe_layer_freq or any(self.moe_layer_freq[index : index + 1])
        act, scale = limited(CLAMPED_SWIGLU, self.swiglu_limit), self.routed_scaling_factor
        if not glm4_moe_lite.sparse(self.mlp_layer_types, index, usual):
            return Dense(self.dense_intermediate_size, act)
        params = RouterParams(self.num_experts_per_tok, "sigmoid", corrected=True, scale=scale)
        return Experts(self.intermediate_size, self.num_local_experts, params, act, self.shared_intermediate_size)


class Attention(llama.NormedAttention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.indexer = None
        if args.has_indexer(index):
            blocks = Blocks(args.index_block_size, args.index_topk_blocks, args.index_local_blocks)
            self.attention = BlockSparseAttention(local, args.attention_params(index), blocks, args.rotated)
            self.indexer = BlockIndexer(
                args.hidden_size, args.index_n_heads, args.index_head_dim, mesh, args.rms_norm_eps, args.norm_offset
            )

    def cache_spec(self) -> CacheSpec:  # type: ignore[override]
        kept = super().cache_spec()
        if self.indexer is None:
            return kept
        assert isinstance(self.attention, BlockSparseAttention)
        return Indexed(kept, PagedLatent(self.indexer.dim), self.attention.blocks.tokens)

    @property
    def inner(self) -> int:
        """Elements of a token between this rank's linears."""
        (queries, keys, dim), indexer = self.qkv_proj.heads, self.indexer
        return 2 * (queries + keys) * dim + (0 if indexer is None else (indexer.heads + 1) * indexer.dim)

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        if self.indexer is None:
            return super().forward(h, cos_sin, batch)
        assert isinstance(self.attention, BlockSparseAttention)
        q, k, v = self.qkv_proj.split(self.qkv_proj(h))
        index_q = self.indexer(h, cos_sin, batch.slots, self.attention.index_cache(batch))
        return self.o_proj(self.attention.attend_blocks(h, q, k, v, cos_sin, batch, self.norms, index_q))


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(base.Model):
    LAYER = Layer
    MERGED = base.Model.MERGED | {"qk_proj": ("q_proj", "k_proj")}
    RENAMED = minimax_m2.Model.RENAMED | {
        f".self_attn.index_{name}.": f".self_attn.indexer.{name}." for name in ("q_proj", "k_proj", "q_norm", "k_norm")
    }
