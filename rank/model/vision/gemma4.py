"""Gemma 4's tower (Gemma team 2026): Gemma's layers over patches, with rotary and with learned positions of rows and
columns; neighbours are averaged."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from ....kernels.rope.rope import rotate
from ...vision import number
from ...vision.gemma4 import Rules
from .. import base, shard
from ..layers.norm import RMSNorm
from ..weights.slicing import Field, Ratio, ShardedModule, parameter
from ._tower import LARGEST, Replicated, Rotation, activation_of, frequencies, in_rows, normalised, rotation

LIMITS = "input_min", "input_max", "output_min", "output_max"
AXES = Ratio(2, 0, shared=True)  # x and y


class Clipped(ShardedModule):
    """A linear whose inputs and outputs have limits, where checkpoints have some."""

    def __init__(self, inputs: int, outputs: int, clipped: bool):
        super().__init__()
        self.fields = tuple(Field(name, "o") for name in LIMITS) if clipped else ()
        self.outputs, self.linear = (shard.whole(1),), Replicated(inputs, outputs, bias=False)
        for name in LIMITS if clipped else ():
            setattr(self, name, parameter(1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.fields:
            return self.linear(x)
        low, high, least, most = (getattr(self, name) for name in LIMITS)
        return self.linear(x.clamp(low, high)).clamp(least, most)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int, eps: float, clipped: bool):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.q_proj, self.o_proj = Clipped(hidden, heads * dim, clipped), Clipped(heads * dim, hidden, clipped)
        self.k_proj, self.v_proj = (Clipped(hidden, kv_heads * dim, clipped) for _ in range(2))
        self.q_norm, self.k_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)

    def forward(self, x: Tensor, both: Sequence[Rotation]) -> Tensor:
        """both: by the patches' columns, for the first half of a head, and by their rows."""
        q, k, v = (linear(x).unflatten(1, (-1, self.dim)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        for one in (q, k):
            for half, by in zip(one.chunk(2, 2), both, strict=True):
                rotate(half, *by)
        v = rms_norm(v, (self.dim,), eps=self.eps)
        q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
        seen = scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)
        return self.o_proj(seen[0].transpose(0, 1).flatten(1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int, activation: str, clipped: bool):
        super().__init__()
        self.gate_proj, self.up_proj = Clipped(hidden, inner, clipped), Clipped(hidden, inner, clipped)
        self.down_proj = Clipped(inner, hidden, clipped)
        self.activation = activation_of(activation, "hidden_activation of vision_config")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, attention: Attention, mlp: FeedForward, hidden: int, eps: float):
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)

    def forward(self, x: Tensor, both: Sequence[Rotation]) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), both))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class PatchEmbedder(ShardedModule):
    """The patches, and a learned position for each row and each column."""

    fields = (Field("position_embedding_table", "boi", ratios={"b": AXES}),)

    def __init__(self, hidden: int, patch: int, positions: int):
        super().__init__()
        self.inputs, self.outputs = shard.whole(hidden), (shard.whole(positions),)
        self.input_proj = Replicated(3 * patch**2, hidden, bias=False)
        self.position_embedding_table = parameter(2, positions, hidden)

    def forward(self, patches: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        """patches: [N, 3, patch, patch] f32, whose colours stand side by side in checkpoints."""
        table = self.position_embedding_table
        x = self.input_proj(patches.permute(0, 2, 3, 1).flatten(1).to(table.dtype))
        return x + (table[0, columns] + table[1, rows])


class Encoder(ShardedModule):
    """Its modules are called as in checkpoints, which may have a mean and a deviation of features."""

    def __init__(self, config: dict[str, Any], rules: Rules):
        """config: vision_config. Raises ValueError for values that cannot be."""
        super().__init__()
        hidden, inner = number(config, "hidden_size", 768, LARGEST), number(config, "intermediate_size", 3072, LARGEST)
        heads = number(config, "num_attention_heads", 12, LARGEST)
        kv_heads, dim = number(config, "num_key_value_heads", heads, LARGEST), number(config, "head_dim", 64, LARGEST)
        positions = number(config, "position_embedding_size", 10 << 10, 1 << 20)
        eps, clipped = float(config.get("rms_norm_eps", 1e-6)), bool(config.get("use_clipped_linears"))
        if dim % 4 or heads % kv_heads:
            raise ValueError(f"vision_config has {heads} heads of {dim} dimensions and {kv_heads} key heads")
        if rules.most * rules.merge > positions:
            raise ValueError(f"max_soft_tokens is {rules.most}, more than position_embedding_size {positions} allows")
        self.hidden, self.dim, self.depth = hidden, dim, number(config, "num_hidden_layers", 16, 1 << 10)
        self.theta = float((config.get("rope_parameters") or {}).get("rope_theta", 100.0))
        self.patch_embedder = PatchEmbedder(hidden, rules.patch, positions)
        act = config.get("hidden_activation", "gelu_pytorch_tanh")
        made = nn.ModuleList(
            Layer(
                Attention(hidden, heads, kv_heads, dim, eps, clipped),
                FeedForward(hidden, inner, act, clipped),
                hidden,
                eps,
            )
            for _ in range(self.depth)
        )
        self.encoder, self.layers = nn.ModuleDict({"layers": made}), [made]
        named = ("std_bias", "std_scale") if config.get("standardize") else ()
        self.fields, self.outputs = tuple(Field(name, "o") for name in named), (shard.whole(hidden),)
        for name in named:
            setattr(self, name, parameter(hidden))

    def pieces(self, colours: Tensor, patch: int, merge: int) -> Generator[None, None, Tensor]:
        """[tokens, hidden] f32 of colours [3, height, width] f32, row by row."""
        height, width = (length // patch for length in colours.shape[1:])
        at = torch.meshgrid(*(torch.arange(n, device=colours.device) for n in (height, width)), indexing="ij")
        rows, columns = (one.flatten() for one in at)
        x = self.patch_embedder(in_rows(colours, patch), columns, rows)
        turns = frequencies(self.theta, self.dim // 2, x.device)
        both = [rotation(at[:, None] * turns) for at in (columns, rows)]
        for layer in self.layers[0]:
            x = layer(x, both)
            yield
        x = x.view(height // merge, merge, width // merge, merge, -1).float().mean((1, 3)).flatten(0, 1)
        x = x.to(colours.dtype) * self.hidden**0.5
        return (x - self.std_bias.float()) * self.std_scale.float() if self.fields else x


class Tower(base.Tower):
    rules: Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for values that cannot be."""
        super().__init__()
        config, self.rules = args.vision_config or {}, cast(Rules, args.rules)
        self.tower = Encoder(config, self.rules)
        self.hidden, self.depth, self.eps = self.tower.hidden, self.tower.depth, float(config.get("rms_norm_eps", 1e-6))
        self.projector = nn.ModuleDict({"embedding_projection": Replicated(self.hidden, args.hidden_size, bias=False)})

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of an image [height, width, 3] u8, row by row."""
        x = yield from self.tower.pieces(normalised(pixels, self.rules), self.rules.patch, self.rules.merge)
        x = x.to(self.tower.patch_embedder.position_embedding_table.dtype)
        return self.projector["embedding_projection"](rms_norm(x, (self.hidden,), eps=self.eps))
