"""The encoder of CLIP (Radford et al. 2021, arXiv 2103.00020) and of SigLIP (Zhai et al. 2023, arXiv 2303.15343): a
transformer over the patches of a square of one size, with a learned position for each."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ...vision import ImageRules, number
from ...vision.llava import CLIP
from .. import base
from ..layers.embedding import PositionEmbedding
from ..layers.norm import LayerNorm
from ..shard import whole
from ..weights.slicing import Field, ShardedModule, parameter
from ._tower import LARGEST, FeedForward, PatchEmbedding, Replicated, in_rows, normalised

DEFAULTS: dict[str, dict[str, Any]] = {
    CLIP: {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
SIZES = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv_proj, self.out_proj = Replicated(hidden, hidden, hidden, hidden), Replicated(hidden, hidden)

    def forward(self, x: Tensor, squares: int) -> Tensor:
        """x: [squares * tokens, hidden]; the tokens of a square attend to each other."""
        q, k, v = self.qkv_proj(x).view(squares, -1, 3, self.heads, x.shape[1] // self.heads).permute(2, 0, 3, 1, 4)
        return self.out_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, activation: str, eps: float):
        super().__init__()
        self.layer_norm1, self.layer_norm2 = LayerNorm(hidden, eps), LayerNorm(hidden, eps)
        self.self_attn, self.mlp = Attention(hidden, heads), FeedForward(hidden, inner, activation)

    def forward(self, x: Tensor, squares: int) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), squares)
        return x + self.mlp(self.layer_norm2(x))


class Embeddings(ShardedModule):
    """The patches at their positions; CLIP has a token that stands for the whole before them."""

    def __init__(self, hidden: int, patch: int, patches: int, clip: bool):
        super().__init__()
        self.fields, self.outputs = (Field("class_embedding", "o"),) if clip else (), (whole(hidden),)
        self.class_embedding = parameter(hidden) if clip else None
        self.patch_embedding = PatchEmbedding(patch, hidden, bias=not clip)
        self.position_embedding = PositionEmbedding(patches + clip, hidden)

    def forward(self, squares: Tensor) -> Tensor:
        """[squares, tokens, hidden] of squares [squares, 3, edge, edge]."""
        patch = self.patch_embedding.weight.shape[-1]
        x = torch.stack([self.patch_embedding(in_rows(one, patch)) for one in squares])
        if self.class_embedding is not None:
            x = torch.cat((self.class_embedding.expand(len(x), 1, -1), x), 1)
        return x + self.position_embedding.weight


class Encoder(nn.Module):
    """Its modules are called as in checkpoints."""

    def __init__(self, config: dict[str, Any], edge: int, patch: int, layers: int = 0, normed: bool = True):
        """config: vision_config. edge: of an image, in pixels. layers: that are computed; below 1: all but so many.
        normed: the last norm is computed. Raises ValueError for values that cannot be."""
        super().__init__()
        kind = config.get("model_type", CLIP)
        if kind not in DEFAULTS:
            raise ValueError(f"model_type of vision_config is {kind!r}, expected one of {', '.join(DEFAULTS)}")
        of = DEFAULTS[kind] | config
        hidden, inner, depth, heads = (number(config, key, default, LARGEST) for key, default in SIZES.items())
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} of vision_config is no multiple of its {heads} heads")
        self.hidden, self.clip, eps = hidden, kind == CLIP, float(of["layer_norm_eps"])
        self.tokens = (edge // patch) ** 2  # of a square
        if not 0 < (count := layers if layers > 0 else depth + layers) <= depth:
            raise ValueError(f"layer {layers} of vision_config's {depth} is asked for")
        self.embeddings = Embeddings(hidden, patch, self.tokens, self.clip)
        self.pre_layrnorm = LayerNorm(hidden, eps) if self.clip else None
        made = nn.ModuleList([Layer(hidden, inner, heads, of["hidden_act"], eps) for _ in range(count)])
        self.encoder, self.layers = nn.ModuleDict({"layers": made}), [made]
        self.post_layernorm, self.depth = LayerNorm(hidden, eps) if normed else None, count

    def pieces(self, squares: Tensor) -> Generator[None, None, Tensor]:
        """[squares, tokens, hidden] of colours [squares, 3, edge, edge] f32, a layer at a time: patches row by row,
        behind CLIP's token of all."""
        x = self.embeddings(squares)
        shape, x = x.shape, x.flatten(0, 1)
        x = x if self.pre_layrnorm is None else self.pre_layrnorm(x)
        for layer in self.layers[0]:
            x = layer(x, len(squares))
            yield
        return (x if self.post_layernorm is None else self.post_layernorm(x)).view(shape)


class SquaresTower(base.Tower):
    """A tower over squares of one size, which do not attend to each other."""

    tower: Encoder

    def multiplications(self) -> tuple[float, float]:
        attention = 2 * self.depth * self.hidden * self.tower.tokens  # of a square's patches alone
        return (self.num_weights + attention) / self.rules.patch**2, 0.0


def below(pixels: Tensor, edge: int, rules: ImageRules) -> Tensor:
    """Colours [squares, 3, edge, edge] of squares that stand one below the other in pixels [height, edge, 3] u8."""
    return normalised(pixels, rules).unflatten(1, (-1, edge)).transpose(0, 1)
