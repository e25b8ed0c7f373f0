"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840), as published for Llama, Qwen3 and gpt-oss.

A head is one layer of Llama's kind, whose attention reads twice the width: at each position what a linear makes of the
target's hidden states between three pairs of its layers, and next to it the embedding of the token that follows. It
goes on to a further token from its own residual stream. Its vocabulary may be a part of the target's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import USAGE, FatalError
from ....kernels.rope.rope import CosSin
from .. import base
from ..architectures import llama
from ..batch import Batch
from ..config import Config
from ..layers.embedding import ParallelLMHead
from ..layers.linear import ColumnParallel, QKVParallel
from ..layers.mlp import GatedMLP
from ..layers.norm import AddRMSNorm, RMSNorm
from ..layers.residual import ResidualStream
from ..layers.rope import RotaryEmbeddings
from ..load import Classes
from ..shard import whole
from ..weights.slicing import Field, ShardedModule
from . import MOST
from .part import Part

READ = 3  # hidden states of the target at each position


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    draft_vocab_size: int = 0  # 0: the target's
    target_hidden_size: int = 0  # 0: its own
    norm_before_residual: bool = False  # the residual stream begins behind the norm of what is read

    def __post_init__(self) -> None:
        base.expect("num_hidden_layers", self.num_hidden_layers, 1)


class Vocabulary(ShardedModule):
    """The number that is added to each token of the head's vocabulary for the target's id of it."""

    fields = (Field("weight", "o", torch.int64),)

    def __init__(self, size: int):
        super().__init__()
        self.outputs = (whole(size),)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.int64, device="meta"), requires_grad=False)


class Attention(llama.Attention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        heads, keys = args.num_attention_heads, args.num_key_value_heads
        self.qkv_proj = QKVParallel(2 * args.hidden_size, heads, keys, args.head_dim, mesh, args.qkv_bias)


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attn = Attention(args, mesh, index, local)
        self.post_attention_layernorm = AddRMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, args.intermediate_size, mesh, args.hidden_act, args.mlp_bias)
        self.norm_first = args.norm_before_residual

    def run(self, embedded: Tensor, before: Tensor, cos_sin: CosSin, batch: Batch) -> Tensor:
        """The residual stream [T, hidden] behind the layer."""
        normed = self.hidden_norm(before)
        stream = ResidualStream((normed if self.norm_first else before).clone())
        both = torch.cat((self.input_layernorm(embedded), normed), 1)
        stream.add(self.self_attn(cast(Any, both), cos_sin, batch))  # a norm that is computed
        stream.add(self.mlp(self.post_attention_layernorm(stream)))
        return stream.read()


class Head(Part):
    FOLLOWS: ClassVar[bool] = True
    LAYER = Layer
    most = MOST

    def make(self, args: Any, mesh: Mesh, names: Collection[str]) -> None:
        self.vocab_size = args.draft_vocab_size or args.vocab_size
        self.fc = ColumnParallel(
            whole(READ * (args.target_hidden_size or args.hidden_size)), (whole(args.hidden_size),), False
        )
        self.model = base.Decoder(args, mesh, Layer)
        if "model.embed_tokens.weight" not in names:
            self.model.embed_tokens = None  # the target's
        self.rope = RotaryEmbeddings([args.rope(0)], args.head_dim, args.max_position_embeddings, self.max_model_len)
        own = not names or "lm_head.weight" in names
        self.lm_head = ParallelLMHead(self.vocab_size, args.hidden_size, mesh) if own else None
        self.offsets = Vocabulary(self.vocab_size) if "offsets.weight" in names else None
        self.vocabulary: Tensor | None = None

    @classmethod
    def rename(cls, name: str) -> str:
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        if name == "d2t":
            return "offsets.weight"
        return name if name.startswith(("fc.", "lm_head.", "t2d")) else f"model.{name}"

    @classmethod
    def spelled(cls, name: str) -> str:
        return "d2t" if name == "offsets.weight" else name

    def join(self, target: base.Model) -> None:
        """Read this model's hidden states from now on, those before its `aux_layers`; and what the head has not of its
        own is the model's."""
        self._skip = target.hidden_size
        embedding, head = self.model.embed_tokens or target.model.embed_tokens, self.lm_head or target.lm_head
        assert embedding is not None and head is not None
        self._embed, self._whole_head = embedding.forward, head.forward
        if self.offsets is not None:
            each = self.offsets.weight.data
            self.vocabulary = (torch.arange(len(each), device=each.device) + each).clamp(0, target.vocab_size - 1)

    def read(self, hidden: Tensor) -> Tensor:
        return self.fc(hidden[:, self._skip :].contiguous())

    def forward(self, batch: Batch, before: Tensor | None) -> Tensor:  # type: ignore[override]
        assert before is not None
        layer = cast(Layer, self.model.layers["0"])
        return layer.run(self._embed(batch.ids), before, self.rope(batch.positions)[0], batch)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.model.norm is not None
        return self._whole_head(self.model.norm(hidden))


def choose(config: Config, tensors: Collection[str]) -> Classes:
    return Classes(Args, Head)


def layers_read(config: Config, layers: int) -> tuple[int, ...]:
    """The target's layers before which its hidden states are read. layers: how many it has.

    Configs of SGLang's and NVIDIA's kind name the layers behind which that is.
    """
    behind = (config.raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    given = config.raw.get("eagle_aux_hidden_state_layer_ids") or config.raw.get("aux_hidden_state_layer_ids")
    found = [one + 1 for one in behind] if behind else given or (2, layers // 2, layers - 3)
    if len(set(found)) != READ or not all(isinstance(one, int) and 0 <= one <= layers for one in found):
        raise FatalError(
            f"--draft-model {config.path}: an EAGLE-3 head that reads hidden states of the layers {list(found)} "
            f"does not fit a model of {layers} layers, of which it is to read three",
            USAGE,
        )
    return tuple(sorted(found))
