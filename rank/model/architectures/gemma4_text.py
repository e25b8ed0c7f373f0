"""Gemma 4, text (Gemma team 2026): Gemma 3's layers, where those of full attention have larger heads and may take keys
for values. Small models have an embedding of each token for each layer, and layers that share keys and values; others
may have experts next to the MLP."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ....comm.mesh import Mesh
from ....errors import MODEL, USAGE, FatalError
from ....kernels.attention.attention import AttentionParams
from ....kernels.rope.rope import CosSin
from .. import base
from ..base import Count
from ..batch import Batch
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.feed_forward import Dense
from ..layers.layer_inputs import LayerInput, LayerInputs
from ..layers.norm import LayerScalar, RMSNorm
from ..layers.normed_moe import NormedMoE
from ..layers.residual import Normed, ResidualStream
from ..layers.rope import Parameters
from ..layers.shared_kv import SharedKVAttention, SharedKVSizes
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

# Modules that checkpoints have outside the layers, and in each.
OF_ALL_LAYERS = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
OF_A_LAYER = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"


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


class Attention(SharedKVAttention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        full, source = args.layer_type(index) == FULL, args.source(index)
        outputs = 0 if source != index else 1 if args.attention_k_eq_v and full else 2
        heads, eps, bias = args.num_attention_heads, args.rms_norm_eps, args.attention_bias
        sizes = SharedKVSizes(args.hidden_size, heads, *args.heads(index), eps, bias, outputs, full)
        super().__init__(sizes, args.attention_params(index), mesh, index, local, local - index + source)


class Layer(gemma2.Layer):
    ATTENTION = Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        hidden, size = args.hidden_size, args.hidden_size_per_layer_input
        act, eps = args.hidden_activation, args.rms_norm_eps
        inner, experts, top = (one or 0 for one in (args.moe_intermediate_size, args.num_experts, args.top_k_experts))
        self.routed = NormedMoE(hidden, inner, experts, top, act, eps, mesh) if args.enable_moe_block else None
        self.after_mlp = RMSNorm(hidden, eps) if args.enable_moe_block else None
        self.input = LayerInput(hidden, size, act, eps, index) if size else None
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
    def __init__(self, args: Args, mesh: Mesh, layer: type[base.Layer]):
        super().__init__(args, mesh, layer)
        self.pad = args.pad_token_id or 0  # stands for images' tokens in embeddings for layers
        hidden, size, vocab = args.hidden_size, args.hidden_size_per_layer_input, args.vocab_size_per_layer_input
        of = hidden, vocab, args.num_hidden_layers, size, args.rms_norm_eps, mesh
        self.inputs = LayerInputs(*of) if size else None

    def embed(self, batch: Batch) -> Tensor:
        embedded = super().embed(batch)
        if self.inputs is not None:
            images = batch.embeddings
            ids = batch.ids if images is None else batch.ids.index_fill(0, images.at, self.pad)
            batch.layer_inputs = self.inputs(embedded, ids)
        return embedded


class Model(base.Model):
    LAYER, DECODER = Layer, Decoder
    MERGED = base.Model.MERGED | {"qk_proj": ("q_proj", "k_proj")}
    RENAMED = {
        **{f"model.{name}.": f"model.inputs.{name}." for name in OF_ALL_LAYERS},
        ".layer_scalar": ".scalar.layer_scalar",
        ".router.scale": ".routed.norm.weight",
        ".router.per_expert_scale": ".routed.scale.per_expert_scale",
        ".router.proj.": ".routed.proj.",
        ".experts.": ".routed.experts.",
        ".pre_feedforward_layernorm_2.": ".routed.before.",
        ".post_feedforward_layernorm_2.": ".routed.after.",
        ".post_feedforward_layernorm_1.": ".after_mlp.",
        **{f".{name}.": f".input.{name}." for name in OF_A_LAYER},
    }
