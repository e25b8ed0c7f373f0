"""BLIP's tower (Li et al. 2022, arXiv 2201.12086): a vision transformer whose features are what the text attends to.
Of models that answer questions a text encoder reads the question with it, and its states are the features."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from ...vision import number
from ...vision.blip import Rules
from .. import base
from ..layers.embedding import PositionEmbedding
from ..layers.linear import Linear
from ..layers.norm import LayerNorm
from ._encoder import Layer
from ._tower import LARGEST, FeedForward, PatchEmbedding, Replicated, in_rows, normalised
from .moondream1 import Positions


class ReaderLayer(nn.Module):
    """Half a layer of checkpoints: attention of a text's tokens to each other or, with the MLP behind it, to the image.
    Its modules are called as those of the decoder's halves."""

    def __init__(self, args: Any, seen: int):
        """seen: size of the image's hidden states; 0: the tokens attend to each other."""
        super().__init__()
        size, self.heads, self.to_image = args.text_size, args.num_attention_heads, seen > 0
        if seen:
            self.q_proj, self.kv_proj = Replicated(size, size), Replicated(seen, size, size)
            self.mlp = FeedForward(size, args.intermediate_size, args.hidden_act)
            self.mlp_norm = LayerNorm(size, args.layer_norm_eps)
        else:
            self.qkv_proj = Replicated(size, size, size, size)
        self.o_proj, self.norm = Replicated(size, size), LayerNorm(size, args.layer_norm_eps)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        """x: [T, size]. image: [tokens, seen]."""
        q, k, v = (self.q_proj(x), *self.kv_proj(image).chunk(2, 1)) if self.to_image else self.qkv_proj(x).chunk(3, 1)
        q, k, v = (one.unflatten(1, (self.heads, -1)).transpose(0, 1)[None] for one in (q, k, v))
        found = scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        x = self.norm(self.o_proj(found) + x)
        return self.mlp_norm(self.mlp(x) + x) if self.to_image else x


class Reader(nn.Module):
    """BERT's encoder, whose layers attend to an image, too."""

    def __init__(self, args: Any, seen: int):
        super().__init__()
        size = args.text_size
        self.embed_tokens = PositionEmbedding(args.vocab_size, size)  # whole on every rank
        self.embed_positions = PositionEmbedding(args.max_position_embeddings, size)
        self.embed_norm = LayerNorm(size, args.layer_norm_eps)
        halves = range(args.num_hidden_layers)
        self.layers = nn.ModuleList([ReaderLayer(args, seen if half % 2 else 0) for half in halves])

    def pieces(self, ids: Tensor, image: Tensor) -> Generator[None, None, Tensor]:
        """States [T, size] of a text's tokens [T]."""
        positions = torch.arange(len(ids), device=ids.device)
        x = self.embed_norm(self.embed_tokens(ids) + self.embed_positions(positions))
        for layer in self.layers:
            x = layer(x, image)
            if layer.to_image:
                yield
        return x


class Tower(base.Tower):
    rules: Rules

    def __init__(self, args: Any):
        """args: of the architecture. Raises ValueError for values that cannot be."""
        super().__init__()
        config, self.rules = args.vision_config or {}, cast(Rules, args.rules)
        hidden, heads = number(config, "hidden_size", 768, LARGEST), number(config, "num_attention_heads", 12, LARGEST)
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} of vision_config is no multiple of its {heads} heads")
        inner, eps = number(config, "intermediate_size", 3072, LARGEST), float(config.get("layer_norm_eps", 1e-5))
        self.hidden, self.depth = hidden, number(config, "num_hidden_layers", 12, 1 << 10)
        self.outputs = args.hidden_size
        self.class_embedding = Positions(1, hidden)
        self.position_embedding = Positions(1 + (self.rules.edge // self.rules.patch) ** 2, hidden)
        self.patch_embedding = PatchEmbedding(self.rules.patch, hidden, bias=True)
        of = hidden, inner, heads, config.get("hidden_act", "gelu"), eps
        self.layers = nn.ModuleList([Layer(*of) for _ in range(self.depth)])
        self.post_layernorm = LayerNorm(hidden, eps)
        self.reader = Reader(args, hidden) if self.rules.frame else None
        if self.reader is not None:
            self.depth += len(self.reader.layers) // 2

    @property
    def num_weights(self) -> int:
        """Weights of linears that patches are multiplied with."""
        return sum(one.num_weights for one in self.layers.modules() if isinstance(one, Linear))

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [1 + patches, outputs] of an image [edge, edge, 3] u8, the whole image's first. Behind each are
        zeros, and a one, which tells it from a text's."""
        return self._marked((yield from self._states(pixels)))

    def reading(self, pixels: Tensor, text: Tensor) -> Generator[None, None, Tensor]:
        assert self.reader is not None
        image = yield from self._states(pixels)
        return self._marked((yield from self.reader.pieces(text, image)))

    def _states(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        x = self.patch_embedding(in_rows(normalised(pixels, self.rules), self.rules.patch))
        x = torch.cat((self.class_embedding.weight[0], x)) + self.position_embedding.weight[0]
        for layer in self.layers:
            x = layer(x, 1)
            yield
        return self.post_layernorm(x)

    def _marked(self, x: Tensor) -> Tensor:
        x = pad(x, (0, self.outputs - x.shape[1]))
        x[:, -1] = 1
        return x
