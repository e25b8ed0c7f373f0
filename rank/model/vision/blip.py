"""BLIP's tower (Li et al. 2022, arXiv 2201.12086): a vision transformer whose features are what the text attends to."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...vision import whole
from ...vision.blip import Rules
from .. import base
from ..layers.norm import LayerNorm
from ._encoder import Layer
from ._tower import LARGEST, PatchEmbedding, in_rows, normalised
from .moondream1 import Positions


class Tower(base.Tower):
    rules: Rules

    def __init__(self, args: Any):
        """args: of the architecture. Raises ValueError for values that cannot be."""
        super().__init__()
        config, self.rules = args.vision_config or {}, cast(Rules, args.rules)
        hidden, heads = args.seen_size, whole(config, "num_attention_heads", 12, LARGEST)
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} of vision_config is no multiple of its {heads} heads")
        inner, eps = whole(config, "intermediate_size", 3072, LARGEST), float(config.get("layer_norm_eps", 1e-5))
        self.hidden, self.depth = hidden, whole(config, "num_hidden_layers", 12, 1 << 10)
        self.outputs = args.hidden_size
        self.class_embedding = Positions(1, hidden)
        self.position_embedding = Positions(self.rules.grid(0, 0)[0], hidden)
        self.patch_embedding = PatchEmbedding(self.rules.patch, hidden, bias=True)
        of = hidden, inner, heads, config.get("hidden_act", "gelu"), eps
        self.layers = nn.ModuleList([Layer(*of) for _ in range(self.depth)])
        self.post_layernorm = LayerNorm(hidden, eps)

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [1 + patches, outputs] of an image [edge, edge, 3] u8, the whole image's first. Behind each are
        zeros, and a one, which tells it from a text's."""
        x = self.patch_embedding(in_rows(normalised(pixels, self.rules), self.rules.patch))
        x = torch.cat((self.class_embedding.weight[0], x)) + self.position_embedding.weight[0]
        for layer in self.layers:
            x = layer(x, 1)
            yield
        x = pad(self.post_layernorm(x), (0, self.outputs - x.shape[1]))
        x[:, -1] = 1
        return x
