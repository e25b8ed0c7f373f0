"""GLM-5.3 Flash, text (Zhipu AI 2026): hyper-connections as DeepSeek-V4's, three layers of Kimi delta attention to one
of latent attention that reads pools of tokens that an indexer chooses, and experts behind dense layers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import ClassVar

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.activation.activation import CLAMPED_SILU
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count
from ..batch import Batch
from ..config import FULL, LINEAR
from ..layers.attention import layer_type
from ..layers.gated_delta_net import DeltaNetShape, KimiDeltaAttention
from ..layers.hyper_connections import HyperConnection, HyperMean, HyperNormed, HyperSizes
from ..layers.indexer import IndexSizes
from ..layers.mla import LatentSizes
from ..layers.mlp import limited
from ..layers.pooled_indexer import PooledLatentAttention
from ..layers.residual import Normed, ResidualStream
from . import deepseek_v3, deepseek_v4, glm_moe_dsa, kimi_linear

CONFIG = {"names": {"qk_nope_head_dim": "head_dim"}}  # all of a head: nothing is rotated
INDEXED = "indexed_attention"


@dataclass(frozen=True, kw_only=True)
class Args(kimi_linear.Args):
    q_lora_rank: Count = 1536
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 256
    qk_rope_head_dim: int = 0
    v_head_dim: Count = 256
    n_routed_experts: Count = 288
    n_shared_experts: Count = 1
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 2048
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    swiglu_limit: float = 10.0
    linear_num_heads: Count = 64
    linear_lower_bound: float | None = -5.0
    hc_mult: Count = 4
    hc_sinkhorn_iters: Count = 20
    hc_eps: float = 1e-6
    index_n_heads: Count = 32
    index_head_dim: Count = 128
    index_topk: Count = 2048
    index_kpool: Count = 16
    index_kpool_always_select_tail: bool = True
    indexer_types: list[str] = field(default_factory=list)
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hidden_act", limited(CLAMPED_SILU, self.swiglu_limit))
        base.expect("qk_rope_head_dim", self.qk_rope_head_dim, 0)
        base.expect("index_kpool_always_select_tail", self.index_kpool_always_select_tail, True)
        if self.index_topk % self.index_kpool:
            raise FatalError(
                f"config.json: index_topk {self.index_topk} is no multiple of index_kpool {self.index_kpool}", MODEL
            )
        if shared := [i for i in range(self.num_hidden_layers) if not self.linear(i) and not self.has_indexer(i)]:
            raise FatalError(f"config.json: layer {shared[0]} shares an indexer, which is not supported", MODEL)

    def has_indexer(self, index: int) -> bool:
        kinds = self.indexer_types or self.index_topk_pattern
        return glm_moe_dsa.has_indexer(kinds, index, self.index_topk_freq, self.index_skip_topk_offset)

    def linear(self, index: int) -> bool:
        types = [INDEXED if kind == FULL else kind for kind in self.layer_types]
        return layer_type(types, index, INDEXED if index % 4 == 3 else LINEAR, (LINEAR, INDEXED)) == LINEAR

    @property
    def delta_net(self) -> DeltaNetShape:
        given = self.linear_attn_config
        floor = given.get("gate_lower_bound", self.linear_lower_bound)
        if floor is None and given and given.get("safe_gate", True):
            floor = -5.0
        if floor is not None and not floor < 0:
            raise FatalError(f"config.json: the decays' lower bound is {floor}, expected a number below 0", MODEL)
        return super().delta_net._replace(floor=floor or 0.0)

    @property
    def latent_sizes(self) -> LatentSizes:
        return super().latent_sizes._replace(eps=self.rms_norm_eps)

    @property
    def hyper_sizes(self) -> HyperSizes:
        return HyperSizes(self.hc_mult, self.hidden_size, self.hc_sinkhorn_iters, self.hc_eps, self.rms_norm_eps)


class Attention(PooledLatentAttention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        sizes = IndexSizes(args.index_n_heads, args.index_head_dim, args.index_topk, interleaved=False)
        super().__init__(
            args.hidden_size, args.latent_sizes, args.attention_params(index), mesh, local, args.attention_bias, sizes,
            args.index_kpool,
        )  # fmt: skip


class DeltaAttention(KimiDeltaAttention):
    DECAY_AXES = "o"


class Layer(kimi_linear.Layer):
    ATTENTION = Attention
    DELTA = DeltaAttention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.hc_attn, self.hc_ffn = HyperConnection(args.hyper_sizes), HyperConnection(args.hyper_sizes)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := HyperNormed(self.hc_attn, self.input_layernorm, stream))
        stream.add(self.mix(h, cos_sin._replace(cos=cos_sin.cos[..., :0], sin=cos_sin.sin[..., :0]), batch))
        yield (h := HyperNormed(self.hc_ffn, self.post_attention_layernorm, stream))
        stream.add(self.mlp(h))


class Decoder(deepseek_v4.Decoder):
    HEAD = HyperMean


class Model(deepseek_v4.Model):
    LAYER: ClassVar[type[base.Layer]] = Layer
    DECODER, DRAFTS = Decoder, False
    MERGED = deepseek_v3.Model.MERGED | KimiDeltaAttention.MERGED | {
        "wk_wgate_weights_proj": ("wk", "wgate", "weights_proj")
    }  # fmt: skip
    RENAMED = KimiDeltaAttention.RENAMED | HyperConnection.RENAMED | {
        ".indexer.index_kpool_compress_ape": ".indexer.bias.ape",
        ".indexer.index_kpool_compress_gate": ".indexer.wgate.weight",
    }  # fmt: skip
