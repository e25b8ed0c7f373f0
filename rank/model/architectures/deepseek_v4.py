"""DeepSeek-V4 Flash and Pro (DeepSeek-AI 2026): hyper-connections, attention to a window and compressed entries, and
experts that token ids choose in the first layers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.activation.activation import CLAMPED_SILU
from ....kernels.attention.attention import AttentionParams
from ....kernels.attention.compressed import Compression
from ....kernels.moe.router import RouterParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count, Divisor
from ..batch import Batch
from ..config import FULL, MOST, SLIDING
from ..layers.attention import layer_type
from ..layers.compressed_attention import CompressedAttention, CompressedSizes
from ..layers.hyper_connections import HyperConnection, HyperHead, HyperNormed, HyperSizes, HyperStream
from ..layers.indexer import IndexSizes
from ..layers.mlp import limited
from ..layers.moe import HashedMoE, SharedMoE
from ..layers.norm import RMSNorm
from ..layers.residual import Normed, ResidualStream
from ..layers.rope import Parameters

# Layers with entries have rope parameters of their own, those of full attention here.
CONFIG = {"defaults": {"head_dim": 512, "num_key_value_heads": 1}, "rope_per_layer_type": True}
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}
HASHED, ROUTED = "hash_moe", "moe"


@dataclass(frozen=True, kw_only=True)
class Args(base.Args):
    q_lora_rank: Count = 1024
    o_groups: Count = 8
    o_lora_rank: Count = 1024
    sliding_window: Count = 128
    layer_types: list[str] = field(default_factory=list)
    compress_ratios: list[int] = field(default_factory=list)
    compress_rates: dict[str, Any] = field(default_factory=RATES.copy)
    rope_theta: Divisor = 10000.0
    compress_rope_theta: Divisor = 160000.0
    qk_rope_head_dim: int = 0
    partial_rotary_factor: float = 0.0  # 0: as qk_rope_head_dim says
    index_n_heads: Count = 64
    index_head_dim: Count = 128
    index_topk: Count = 512
    hc_mult: Count = 4
    hc_sinkhorn_iters: Count = 20
    hc_eps: float = 1e-6
    moe_intermediate_size: Count
    n_routed_experts: Count = 256
    num_experts_per_tok: Count = 6
    mlp_layer_types: list[str] = field(default_factory=list)
    num_hash_layers: int = 3
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        factor = self.partial_rotary_factor or (self.qk_rope_head_dim or self.head_dim / 8) / self.head_dim
        if not 0 < factor <= 1:
            raise FatalError(f"config.json: {factor} of each head is rotated, expected above 0 and at most 1", MODEL)
        object.__setattr__(self, "qk_rope_head_dim", int(self.head_dim * factor))
        object.__setattr__(self, "partial_rotary_factor", factor)
        only = {"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "num_key_value_heads": 1, "hidden_act": "silu"}
        for key, value in only.items():
            base.expect(key, getattr(self, key), value)
        object.__setattr__(self, "hidden_act", limited(CLAMPED_SILU, self.swiglu_limit))

    def layer_type(self, index: int) -> str:
        types = self.layer_types
        if not types and self.compress_ratios:
            names = {0: SLIDING} | {rate: name for name, rate in RATES.items()}
            for ratio in self.compress_ratios:
                base.expect("compress_ratios", ratio, *names)
            types = [names[ratio] for ratio in self.compress_ratios]
        if index >= max(len(types), self.num_hidden_layers):  # it predicts further tokens
            return SLIDING
        default = SPARSE if index > 1 and index % 2 else HEAVY
        return layer_type(types, index, default, (SLIDING, SPARSE, HEAVY))

    @property
    def draft_layer(self) -> int:
        return self.num_hidden_layers

    def compression(self, index: int) -> Compression | None:
        kind = self.layer_type(index)
        if kind == SLIDING:
            return None
        rate = self.compress_rates.get(kind)
        if not isinstance(rate, int) or isinstance(rate, bool) or not 1 <= rate <= MOST:
            raise FatalError(f"config.json: compress_rates has {rate!r} for {kind}, expected 1 to {MOST}", MODEL)
        return Compression(rate, self.head_dim, kind == SPARSE)

    def sizes(self, index: int) -> CompressedSizes:
        sparse = self.layer_type(index) == SPARSE
        index_sizes = IndexSizes(self.index_n_heads, self.index_head_dim, self.index_topk, True) if sparse else None
        return CompressedSizes(
            self.num_attention_heads, self.head_dim, self.q_lora_rank, self.o_groups, self.o_lora_rank,
            self.rms_norm_eps, self.compression(index), index_sizes,
        )  # fmt: skip

    @property
    def hyper_sizes(self) -> HyperSizes:
        return HyperSizes(self.hc_mult, self.hidden_size, self.hc_sinkhorn_iters, self.hc_eps, self.rms_norm_eps)

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams(self.head_dim**-0.5, self.sliding_window)

    def rope(self, index: int) -> Parameters:
        """YaRN has no temperature here."""
        compression = self.compression(index)
        found = self.rope_parameters[FULL if compression else SLIDING] | {"partial_rotary_factor": 1.0}
        theta = self.compress_rope_theta if compression else self.rope_theta
        found |= {"head_dim": self.qk_rope_head_dim, "interleaved": True, "rope_theta": theta}
        if found["rope_type"] == "yarn":
            found.setdefault("attention_factor", 1.0)
        return found | ({"stride": compression.rate} if compression else {})

    def hashed(self, index: int) -> bool:
        """Whether token ids choose a layer's experts."""
        if index < len(self.mlp_layer_types):
            base.expect("mlp_layer_types", self.mlp_layer_types[index], HASHED, ROUTED)
            return self.mlp_layer_types[index] == HASHED
        return index < self.num_hash_layers


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        hidden, inner, eps = args.hidden_size, args.moe_intermediate_size, args.rms_norm_eps
        self.attn = CompressedAttention(hidden, args.sizes(index), args.attention_params(index), mesh, local)
        self.attn_norm, self.ffn_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.hc_attn, self.hc_ffn = HyperConnection(args.hyper_sizes), HyperConnection(args.hyper_sizes)
        experts, top_k = args.n_routed_experts, args.num_experts_per_tok
        params = RouterParams(top_k, "sqrtsoftplus", corrected=True, scale=args.routed_scaling_factor)
        of = hidden, inner, inner, experts, params, mesh, args.hidden_act
        self.ffn = HashedMoE(*of, args.vocab_size) if args.hashed(index) else SharedMoE(*of)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := HyperNormed(self.hc_attn, self.attn_norm, stream))
        stream.add(self.attn(h, cos_sin, batch))
        yield (h := HyperNormed(self.hc_ffn, self.ffn_norm, stream))
        if isinstance(self.ffn, HashedMoE):
            stream.add(self.ffn(h, batch.rows_like(stream, batch.ids)))
        else:
            stream.add(self.ffn(h))


class Decoder(base.Decoder):
    HEAD: ClassVar[type[nn.Module]] = HyperHead

    def __init__(self, args: Args, mesh: Mesh, layer: type[base.Layer]):
        super().__init__(args, mesh, layer)
        self.streams = args.hc_mult
        self.hc_head = self.HEAD(args.hyper_sizes) if mesh.last else None

    def embed(self, batch: Batch) -> Tensor:
        return super().embed(batch).repeat(1, self.streams)


class Model(base.Model):
    LAYER: ClassVar[type[base.Layer]] = Layer
    DECODER, STREAM = Decoder, HyperStream
    MERGED = base.Model.MERGED | {"wq_a_wkv": ("wq_a", "wkv"), "wkv_wgate": ("wkv", "wgate")}
    LEFT_OUT = ("mtp.", "model.mtp.")
    RENAMED = {
        **{f".w{i}.": f".{name}_proj." for i, name in ((1, "gate"), (2, "down"), (3, "up"))},
        ".gate.bias": ".gate.e_score_correction_bias", ".gate.tid2eid": ".gate.table.tid2eid",
        ".attn.norm.": ".attn.kv_norm.", ".attn_sink": ".attn_sink.weight", ".ape": ".bias.ape",
        **HyperConnection.RENAMED,
        ".hc_head_": ".hc_head.hc_", ".hc_head.hc_scale": ".hc_head.factors.scale", ".hc_head.hc_": ".hc_head.",
    }  # fmt: skip

    @property
    def stream_size(self) -> int:
        return self.hidden_size * cast(Decoder, self.model).streams

    @classmethod
    def rename(cls, name: str) -> str:
        """DeepSeek's own files have no prefix."""
        own = {"head.weight": "lm_head.weight", "embed.weight": "model.embed_tokens.weight"}.get(name, name)
        return super().rename(own if own.startswith(("model.", "lm_head.", "mtp.")) else f"model.{own}")

    def normed(self, hidden: Tensor) -> Tensor:
        head = cast(Decoder, self.model).hc_head
        assert head is not None
        return super().normed(head(hidden))
