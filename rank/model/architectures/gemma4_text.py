"""Gemma 4, text (Gemma team 2026): Gemma 3's layers, where those of full attention have larger heads and may take keys
for values. Small models have an embedding of each token for each layer, and layers that share keys and values; others
may have experts next to the MLP."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ....comm.mesh import Mesh
from ....errors import MODEL, USAGE, FatalError
from ....kernels.activation.activation import activate
from ....kernels.attention.attention import AttentionParams
from ....kernels.moe.router import RouterParams
from ....kernels.rope.rope import CosSin, QKNorm
from .. import base
from ..base import Count
from ..batch import Batch
from ..cache_spec import CacheSpec, PagedKV, SharedCache
from ..config import FULL, SLIDING
from ..experts.fused import FusedExperts
from ..layers.attention import PagedAttention, layer_type
from ..layers.embedding import VocabParallelEmbedding
from ..layers.feed_forward import Dense
from ..layers.linear import ColumnParallel, QKVParallel, RowParallel
from ..layers.mlp import activation
from ..layers.moe import Router
from ..layers.norm import PostNorm, RMSNorm
from ..layers.residual import Normed, Partial, PostNormed, ResidualStream
from ..layers.rope import Parameters
from ..shard import whole
from ..weights.slicing import Field, ShardedModule, parameter
from . import gemma2, gemma3_text

CONFIG = {
    "defaults": {
        "head_dim": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    },
    "rope_per_layer_type": True,
}


@dataclass(frozen=True, kw_only=True)
class Args(gemma3_text.Args):
    sliding_window: Count | None = 512
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, Any] = field(default_factory=dict)
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    # "vision": the tokens of an image attend to each other, in sliding layers alone
    use_bidirectional_attention: bool | str | None = None  # type: ignore[assignment]
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        base.expect("use_bidirectional_attention", self.use_bidirectional_attention, None, False, "vision")

    @property
    def norm_offset(self) -> float:  # type: ignore[override]
        return 0.0

    def stage_layers(self, stage: int, stages: int) -> range:
        if stages > 1 and (self.hidden_size_per_layer_input or self.num_kv_shared_layers):
            raise FatalError(
                "--pp: this model's layers share keys and values, or read embeddings of their own, and so are one "
                "stage: use --tp",
                USAGE,
            )
        return super().stage_layers(stage, stages)

    def layer_type(self, index: int) -> str:
        if index == self.num_hidden_layers - 1:  # whatever the list has
            return FULL
        return layer_type(self.layer_types, index, SLIDING if (index + 1) % 6 else FULL)

    def heads(self, index: int) -> tuple[int, int]:
        """A layer's key heads, and their size."""
        if self.layer_type(index) == SLIDING:
            return self.num_key_value_heads, self.head_dim
        heads, own = self.num_key_value_heads, self.per_layer_config.get(str(index), {})
        if self.attention_k_eq_v and self.num_global_key_value_heads:
            heads = self.num_global_key_value_heads
        return own.get("num_key_value_heads", heads), own.get("head_dim", self.global_head_dim)

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters[self.layer_type(index)] | {"head_dim": self.heads(index)[1]}

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams(scale=1.0, window=self.window(index))

    def feed_forward(self, index: int) -> Dense:
        """Layers that share keys and values may have an MLP of twice the size."""
        wide = self.use_double_wide_mlp and self.source(index) != index
        return Dense(self.intermediate_size * (1 + wide), self.hidden_activation)

    def source(self, index: int) -> int:
        """The layer whose keys and values a layer reads: itself, but for the last ones."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        if index < first:
            return index
        of_type = [i for i in range(first) if self.layer_type(i) == self.layer_type(index)]
        if not of_type:
            raise FatalError(f"config.json: layer {index} shares keys and values of a layer that there is not", MODEL)
        return of_type[-1]


class Attention(nn.Module):
    """Queries and keys are normed, and so are values, without a weight."""

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__()
        hidden, heads, eps = args.hidden_size, args.num_attention_heads, args.rms_norm_eps
        kv_heads, dim = args.heads(index)
        self.dim, self.eps, source = dim, eps, args.source(index)
        self.owner = source == index

        ranks = mesh.tensor.size
        if kv_heads % ranks and ranks % kv_heads:
            raise FatalError(f"--tp {ranks}: layer {index} has {kv_heads} key heads, which cannot be shared out", USAGE)

        def projection(key_outputs: int) -> QKVParallel:
            bias = args.attention_bias
            return QKVParallel(hidden, heads, kv_heads, dim, mesh, bias, key_outputs=key_outputs)

        if not self.owner:
            self.q_proj = projection(0)
        elif args.attention_k_eq_v and args.layer_type(index) == FULL:
            self.qk_proj = projection(1)
        else:
            self.qkv_proj = projection(2)
        self.q_norm = RMSNorm(dim, eps)
        if self.owner:
            self.k_norm = RMSNorm(dim, eps)
        self.o_proj = RowParallel(heads * dim, hidden, mesh, args.attention_bias)
        causal = args.layer_type(index) == FULL
        self.attention = PagedAttention(local, args.attention_params(index), local - index + source, causal)

    def cache_spec(self) -> CacheSpec:
        if not self.owner:
            return SharedCache()
        heads = self.projection.heads
        return PagedKV(heads.keys, heads.dim, heads.dim, self.attention.params.window)

    @property
    def projection(self) -> QKVParallel:
        """The linear of queries, and of keys and values as far as these are its own."""
        found = (self._modules.get(name) for name in ("qkv_proj", "qk_proj", "q_proj"))
        return cast(QKVParallel, next(one for one in found if one is not None))

    def forward(self, h: Normed, cos_sin: CosSin, batch: Batch) -> Partial:
        linear = self.projection
        q, *own = linear.split(linear(h))
        if not own:
            return self.o_proj(self.attention.shared(h, self.q_norm(q), cos_sin, batch))
        k, v = own[0], rms_norm(own[-1], (self.dim,), eps=self.eps)
        norms = QKNorm(self.q_norm.weight, self.k_norm.weight, self.eps)
        return self.o_proj(self.attention(h, q, k, v, cos_sin, batch, norms))


class PerExpertScale(ShardedModule):
    """A factor on the weights of each expert."""

    fields = (Field("per_expert_scale", "o", torch.float32),)

    def __init__(self, experts: int):
        super().__init__()
        self.outputs = (whole(experts),)
        self.per_expert_scale = parameter(experts)


class ScaledNorm(RMSNorm):
    """A norm that also divides by the square root of the size."""

    def finish(self) -> None:
        self.weight.data *= self.weight.shape[0] ** -0.5


class Experts(nn.Module):
    """The router, with a norm of its own, and the experts. Both read the residual stream; experts after `norm`."""

    def __init__(self, args: Args, mesh: Mesh):
        super().__init__()
        hidden, experts, top = args.hidden_size, args.num_experts or 0, args.top_k_experts or 0
        inner, act = args.moe_intermediate_size or 0, activation(args.hidden_activation)
        self.norm = ScaledNorm(hidden, args.rms_norm_eps)
        self.proj = Router(hidden, experts, RouterParams(top))
        self.scale = PerExpertScale(experts)
        self.experts = FusedExperts(hidden, inner, experts, top, mesh, act)
        self.before = RMSNorm(hidden, args.rms_norm_eps)
        self.after = RMSNorm(hidden, args.rms_norm_eps)

    def forward(self, residual: Tensor) -> Tensor:
        """residual [T, H], which is not changed → [T, H], equal on all ranks."""
        ids, weights = self.proj(self.norm(residual))
        weights = weights * self.scale.per_expert_scale[ids.long()]
        return self.after(self.experts(self.before(residual), ids, weights).sum())


class LayerScalar(ShardedModule):
    """A factor on the residual stream after a layer, [1]."""

    fields = (Field("layer_scalar", "o"),)

    def __init__(self) -> None:
        super().__init__()
        self.outputs = (whole(1),)
        self.layer_scalar = parameter(1)


class LayerInput(nn.Module):
    """Gates a token's embedding for this layer by the residual stream, and brings it to its size."""

    def __init__(self, args: Args, index: int):
        super().__init__()
        hidden, size = whole(args.hidden_size), whole(args.hidden_size_per_layer_input)
        self.index, self.act = index, activation(args.hidden_activation)
        self.per_layer_input_gate = ColumnParallel(hidden, (size,), bias=False)
        self.per_layer_projection = ColumnParallel(size, (hidden,), bias=False)
        self.post_per_layer_input_norm = PostNorm(args.hidden_size, args.rms_norm_eps)

    def forward(self, stream: ResidualStream, batch: Batch) -> PostNormed:
        assert batch.layer_inputs is not None
        own = batch.rows_like(stream, batch.layer_inputs[:, self.index])
        gated = activate(self.per_layer_input_gate(stream.read()), self.act) * own
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))


class Layer(gemma2.Layer):
    ATTENTION = Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.routed = Experts(args, mesh) if args.enable_moe_block else None
        self.after_mlp = RMSNorm(args.hidden_size, args.rms_norm_eps) if args.enable_moe_block else None
        self.input = LayerInput(args, index) if args.hidden_size_per_layer_input else None
        self.scalar = LayerScalar()

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.input_layernorm(stream))
        stream.add(self.post_attention_layernorm(self.self_attn(h, cos_sin, batch).sum()))
        yield (h := self.pre_feedforward_layernorm(stream))
        made = self.mlp(h).sum()
        if self.routed is not None and self.after_mlp is not None:
            made = self.after_mlp(made) + self.routed(stream.read())
        stream.add(self.post_feedforward_layernorm(made))
        if self.input is not None:
            stream.add(self.input(stream, batch))
        stream.scale(self.scalar.layer_scalar)


class Decoder(base.Decoder):
    """Embeds each token for all layers as well (Gemma 3n's per-layer embeddings)."""

    def __init__(self, args: Args, mesh: Mesh, layer: type[base.Layer]):
        size, layers = args.hidden_size_per_layer_input, args.num_hidden_layers
        super().__init__(args, mesh, layer)
        self.shape, self.scale = (layers, size), args.hidden_size**-0.5
        self.pad = args.pad_token_id or 0  # stands for images' tokens in embeddings for layers
        if size:
            self.embed_tokens_per_layer = VocabParallelEmbedding(
                args.vocab_size_per_layer_input, layers * size, mesh, size**0.5
            )
            self.per_layer_model_projection = ColumnParallel(whole(args.hidden_size), (whole(layers * size),), False)
            self.per_layer_projection_norm = RMSNorm(size, args.rms_norm_eps)

    def embed(self, batch: Batch) -> Tensor:
        embedded = super().embed(batch)
        if self.shape[1]:
            made = self.per_layer_model_projection(embedded).mul_(self.scale).view(-1, *self.shape)
            ids = batch.ids
            if batch.embeddings is not None:
                ids = ids.index_fill(0, batch.embeddings.at, self.pad)
            own = self.embed_tokens_per_layer(ids).view(-1, *self.shape)
            batch.layer_inputs = (self.per_layer_projection_norm(made) + own) * 2**-0.5
        return embedded


class Model(base.Model):
    LAYER, DECODER = Layer, Decoder
    MERGED = base.Model.MERGED | {"qk_proj": ("q_proj", "k_proj")}
    RENAMED = {
        ".layer_scalar": ".scalar.layer_scalar",
        ".router.scale": ".routed.norm.weight",
        ".router.per_expert_scale": ".routed.scale.per_expert_scale",
        ".router.proj.": ".routed.proj.",
        ".experts.": ".routed.experts.",
        ".pre_feedforward_layernorm_2.": ".routed.before.",
        ".post_feedforward_layernorm_2.": ".routed.after.",
        ".post_feedforward_layernorm_1.": ".after_mlp.",
        ".per_layer_input_gate.": ".input.per_layer_input_gate.",
        ".per_layer_projection.": ".input.per_layer_projection.",
        ".post_per_layer_input_norm.": ".input.post_per_layer_input_norm.",
    }
