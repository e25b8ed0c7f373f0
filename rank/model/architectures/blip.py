"""BLIP, captions and answers to questions (Li et al. 2022, arXiv 2201.12086): a BERT decoder whose layers attend to the
text before, and then to an image's features, or to those of a question about it.

The features stand before the text in a sequence, as tokens that no layer changes, so each of a layer's two attentions
is one to the paged cache. A further dimension of keys hides the features from the one and the text from the other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import gelu, pad

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.attention.attention import AttentionParams
from ....kernels.rope.rope import CosSin
from ...protocol import Picture
from ...vision import number
from ...vision.blip import ANSWERS, CAPTIONS, kind
from .. import base
from ..batch import Batch
from ..cache_spec import PagedKV
from ..config import Config
from ..layers.attention import PagedAttention
from ..layers.embedding import ParallelLMHead, PositionEmbedding, VocabParallelEmbedding
from ..layers.linear import ColumnParallel, Linear, QKVParallel, RowParallel
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from ..layers.residual import Normed, ResidualStream, Unnormed
from ..layers.rope import NONE, Parameters
from ..shard import even, scaled, whole
from ..vision import blip
from ..weights.slicing import ShardedModule, Source

CONFIG = {
    "text_type": "blip",
    "layer_parts": 2,
    "images_beside": True,
    "defaults": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 8, "vocab_size": 30524,
                 "max_position_embeddings": 512, "intermediate_size": 3072},
}  # fmt: skip
FURTHER = 16  # dimensions of a head besides, as kernels take heads of multiples of 16
HIDDEN = 1000.0  # by which the logit of a hidden token is lowered
LAYER = re.compile(r"(text_decoder\.bert|text_encoder)\.encoder\.layer\.(\d+)\.(.*)")
# names within a layer of checkpoints → whether it is in the second half, and its name there
PARTS = {
    "attention.self.": (0, ""), "attention.output.dense.": (0, "o_proj."), "attention.output.LayerNorm.": (0, "norm."),
    "crossattention.self.": (1, ""), "crossattention.output.dense.": (1, "o_proj."),
    "crossattention.output.LayerNorm.": (1, "norm."), "intermediate.dense.": (1, "mlp.fc1."),
    "output.dense.": (1, "mlp.fc2."), "output.LayerNorm.": (1, "mlp_norm."),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(base.SeeingArgs):
    """hidden_size, head_dim and num_hidden_layers are those of what is computed; text_size is config.json's."""

    intermediate_size: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    tie_word_embeddings: bool = True
    is_decoder: bool = True
    text_size: int = 0
    seen_size: int = 0

    @classmethod
    def from_config(cls, config: Config) -> Self:
        made = super().from_config(config)
        base.expect("is_decoder", made.is_decoder, True)
        base.expect("architectures", found := kind(config.original), CAPTIONS, ANSWERS)
        try:
            size, seen = made.hidden_size, number(made.vision_config or {}, "hidden_size", 768)
        except ValueError as error:
            raise FatalError(f"{config.file}: vision_config: {error}", MODEL) from None
        if found == ANSWERS:
            seen = size  # of the question's states
        wide = -(-(max(size, seen) + 1) // 16) * 16
        return dataclasses.replace(
            made, text_size=size, seen_size=seen, hidden_size=wide, num_hidden_layers=config.num_layers,
            head_dim=size // made.num_attention_heads + FURTHER,
        )  # fmt: skip

    def rope(self, index: int) -> Parameters:
        return NONE


class Layer(base.Layer):
    """Half a layer of checkpoints: attention to the text or, with the MLP behind it, to the image."""

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.size, self.seen, self.dim = args.text_size, args.seen_size, args.head_dim - FURTHER
        heads, size, group = args.num_attention_heads, args.text_size, mesh.tensor
        self.to_image = index % 2 == 1
        self.heads = even(heads, group.rank, group.size).width
        if self.to_image:
            self.q_proj = QKVParallel(size, heads, heads, self.dim, mesh, True, key_outputs=0)
            part = scaled(even(heads, group.rank, group.size), self.dim)
            self.kv_proj = ColumnParallel(whole(self.seen), (part, part), True)
            self.mlp = MLP(size, args.intermediate_size, mesh, args.hidden_act, bias=True)
            self.mlp_norm = LayerNorm(size, args.layer_norm_eps)
        else:
            self.qkv_proj = QKVParallel(size, heads, heads, self.dim, mesh, True)
        self.o_proj = RowParallel(heads * self.dim, size, mesh, True)
        self.norm = LayerNorm(size, args.layer_norm_eps)
        scale = self.dim**-0.5
        self.lowered = HIDDEN / scale
        self.attention = PagedAttention(local, AttentionParams(scale=scale))

    def cache_spec(self) -> PagedKV:
        return PagedKV(self.heads, self.dim + FURTHER, self.dim + FURTHER)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        h = Unnormed(stream)
        x = h.tensor()
        text, image = x[:, : self.size].contiguous(), x[:, -1]  # 1 of a feature, else 0
        if self.to_image:
            q = self.q_proj(text)
            k, v = self.kv_proj(x[:, : self.seen].contiguous()).chunk(2, 1)
            hidden = 1 - image
        else:
            q, k, v = self.qkv_proj(text).chunk(3, 1)
            hidden = image
        q, k, v = (pad(one.unflatten(1, (self.heads, self.dim)), (0, FURTHER)) for one in (q, k, v))
        q[:, :, self.dim] = 1
        k[:, :, self.dim] = -self.lowered * hidden[:, None]
        found = self.attention(h, q, k, v, cos_sin, batch).unflatten(1, (self.heads, -1))[:, :, : self.dim].flatten(1)
        x = stream.read()  # in the last layer of sampled rows alone
        text, image = x[:, : self.size], x[:, -1:]
        made = self.norm(self.o_proj(found.contiguous()).sum() + text)
        if self.to_image:
            made = self.mlp_norm(self.mlp(made).sum() + made)
        stream.add(pad((made - text) * (1 - image), (0, x.shape[1] - self.size)))
        return
        yield  # norms come after sublayers, and nothing is left to overlap


class Head(nn.Module):
    """Rows before the head's linear: a linear, an activation and a norm."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.size = size
        self.dense, self.LayerNorm = ColumnParallel(whole(size), (whole(size),), True), LayerNorm(size, eps)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.LayerNorm(gelu(self.dense(hidden[:, : self.size].contiguous())))


class Decoder(base.Decoder):
    def __init__(self, args: Args, mesh: Mesh, layer: type[base.Layer]):
        super().__init__(args, mesh, layer)
        self.size, self.wide, self.positions = args.text_size, args.hidden_size, args.max_position_embeddings
        if mesh.first:
            self.embed_tokens = VocabParallelEmbedding(args.vocab_size, self.size, mesh)
            self.embed_positions = PositionEmbedding(args.max_position_embeddings, self.size)
            self.embed_norm = LayerNorm(self.size, args.layer_norm_eps)

    @staticmethod
    def final_norm(args: Any) -> Any:
        return Head(args.text_size, args.layer_norm_eps)

    def embed(self, batch: Batch) -> Tensor:
        assert self.embed_tokens is not None
        positions = batch.positions if batch.positions.dim() == 1 else batch.positions[0]
        positions = positions.clamp(max=self.positions - 1)  # a text without an image may be longer
        x = self.embed_norm(self.embed_tokens(batch.ids) + self.embed_positions(positions))
        x = pad(x, (0, self.wide - self.size))
        if batch.embeddings is not None:
            x[batch.embeddings.at] = batch.embeddings.values.to(x.dtype)
        return x


class Model(base.SeeingModel):
    LAYER, DECODER, TOWER = Layer, Decoder, blip.Tower
    MERGED: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("query", "key", "value"), "q_proj": ("query",), "kv_proj": ("key", "value"),
        "up_proj": ("fc1",), "down_proj": ("fc2",),
    }  # fmt: skip
    PREFIXES: ClassVar[dict[str, str]] = {
        "text_decoder.bert.embeddings.word_embeddings.": "model.embed_tokens.",
        "text_decoder.bert.embeddings.position_embeddings.": "model.embed_positions.",
        "text_decoder.bert.embeddings.LayerNorm.": "model.embed_norm.",
        "text_decoder.cls.predictions.transform.": "model.norm.",
        "text_decoder.cls.predictions.bias": "model.embed_tokens.bias",
        "text_encoder.embeddings.word_embeddings.": "vision.reader.embed_tokens.",
        "text_encoder.embeddings.position_embeddings.": "vision.reader.embed_positions.",
        "text_encoder.embeddings.LayerNorm.": "vision.reader.embed_norm.",
        "vision_model.embeddings.class_embedding": "vision.class_embedding.weight",
        "vision_model.embeddings.position_embedding": "vision.position_embedding.weight",
        "vision_model.embeddings.": "vision.",
        "vision_model.encoder.": "vision.",
        "vision_model.": "vision.",
    }
    RENAMED = {".self_attn.qkv.": ".self_attn.qkv_proj.", ".self_attn.projection.": ".self_attn.out_proj."}
    LEFT_OUT = ("text_decoder.cls.predictions.decoder.", "text_decoder.bert.pooler.")

    @staticmethod
    def _is_tied(args: Any, names: Any) -> bool:
        return False  # the head has a bias, so it reads the table for itself

    def _sources(self, path: str, linear: Linear | ShardedModule, stored: Container[str]) -> list[Source]:
        return [Source("model.embed_tokens")] if linear is self.lm_head else super()._sources(path, linear, stored)

    @staticmethod
    def _head(args: Any, mesh: Mesh) -> ParallelLMHead:
        return ParallelLMHead(args.vocab_size, args.text_size, mesh, bias=True)

    @staticmethod
    def image_positions(length: int, pictures: Sequence[Picture]) -> np.ndarray:
        """Images have none: the text's begin with 0."""
        found = np.arange(length)
        for one in pictures:
            features = one.rows * one.columns
            found[one.start : one.start + features] = 0
            found[one.start + features :] -= features
        return found[None]

    @classmethod
    def rename(cls, name: str) -> str:
        if found := LAYER.fullmatch(name):
            for theirs, (half, ours) in PARTS.items():
                if found[3].startswith(theirs):
                    under = "vision.reader" if found[1] == "text_encoder" else "model"
                    return f"{under}.layers.{2 * int(found[2]) + half}.{ours}{found[3].removeprefix(theirs)}"
        return super().rename(name)

    def _tower(self, args: Any, mesh: Mesh, names: Any) -> base.Tower | None:
        if args.rules is None:
            return None
        self.image_token = args.rules.token
        try:
            return self.TOWER(args) if mesh.first else None
        except (AttributeError, TypeError, ValueError) as error:
            raise FatalError(f"config.json: {error}", MODEL) from None
