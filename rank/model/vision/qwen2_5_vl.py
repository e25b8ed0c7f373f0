"""Qwen2.5-VL's tower (Qwen team 2025, arXiv 2502.13923): most layers attend within windows, some to the whole image;
four neighbours become one token. M-RoPE tells the text model's tokens apart by rows and columns."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from ....kernels.rope.rope import rotate
from ...protocol import Picture
from ...vision import number
from ...vision.qwen2_5_vl import Rules
from .. import base
from ..layers.norm import LayerNorm, RMSNorm
from ._tower import LARGEST, GatedFeedForward, PatchEmbedding, Replicated, Rotation, frequencies, normalised, rotation

EPS = 1e-6


class Windows(NamedTuple):
    """Patches that attend to each other, in windows of one size, which the image's border may cut off."""

    patches: Tensor  # [windows, size] int64: which they are; any beyond the border
    bias: Tensor | None  # [windows, 1, 1, size], -inf beyond the border; None: nothing is
    places: Tensor  # [N] int64: where each patch is in the windows


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = Replicated(hidden, hidden, hidden, hidden), Replicated(hidden, hidden)

    def forward(self, x: Tensor, by: Rotation, windows: Windows | None) -> Tensor:
        """x: [N, hidden]. windows: None: all patches attend to each other."""
        qkv = self.qkv(x).view(len(x), 3 * self.heads, -1)
        rotate(qkv[:, : 2 * self.heads], *by)
        qkv = qkv.view(len(x), 3, self.heads, -1)
        if windows is None:
            q, k, v = qkv.permute(1, 2, 0, 3)[:, None]
            return self.proj(scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
        q, k, v = qkv[windows.patches].permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, windows.bias).transpose(1, 2)
        return self.proj(seen.flatten(0, 1)[windows.places].flatten(1))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, mlp: nn.Module, norm: type[RMSNorm | LayerNorm] = LayerNorm):
        super().__init__()
        self.norm1, self.norm2 = norm(hidden, EPS), norm(hidden, EPS)
        self.attn, self.mlp = Attention(hidden, heads), mlp

    def forward(self, x: Tensor, by: Rotation, windows: Windows | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), by, windows)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Neighbours that follow each other become one token of the text model's size."""

    def __init__(self, hidden: int, count: int, outputs: int, norm: type[RMSNorm | LayerNorm] = RMSNorm):
        super().__init__()
        inner = hidden * count
        self.inner, self.ln_q = inner, norm(hidden, EPS)
        self.mlp = nn.ModuleDict({"0": Replicated(inner, inner), "2": Replicated(inner, outputs)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_q(x).view(-1, self.inner)
        return self.mlp["2"](gelu(self.mlp["0"](x)))


class Tower(base.Tower):
    rules: Rules

    def __init__(self, args: base.SeeingArgs):
        """Raises ValueError for sizes that cannot be."""
        super().__init__()
        config, outputs = args.vision_config or {}, args.hidden_size
        rules = cast(Rules, args.rules)
        hidden, heads, inner = (
            number(config, key, 0, LARGEST) for key in ("hidden_size", "num_heads", "intermediate_size")
        )
        if hidden % (4 * heads):
            raise ValueError(f"hidden_size {hidden} of vision_config is no multiple of 4 times its {heads} heads")
        if (made := number(config, "out_hidden_size", outputs, LARGEST)) != outputs:
            raise ValueError(f"out_hidden_size {made} of vision_config is not the text model's {outputs}")
        self.rules, self.hidden, self.dim = rules, hidden, hidden // heads
        self.window = max(1, number(config, "window_size", 112, LARGEST) // (rules.patch * rules.merge))  # tokens
        self.whole_layers = frozenset(config.get("fullatt_block_indexes", (7, 15, 23, 31)))
        frames, second = number(config, "temporal_patch_size", 2, 16), bool(config.get("second_frame"))
        self.patch_embed = nn.ModuleDict({"proj": PatchEmbedding(rules.patch, hidden, frames, second=second)})
        self.depth, act = number(config, "depth", 32, 1 << 10), config.get("hidden_act", "silu")
        mlps = (GatedFeedForward(hidden, inner, act) for _ in range(self.depth))
        self.blocks = nn.ModuleList(Block(hidden, heads, mlp, RMSNorm) for mlp in mlps)
        self.merger = Merger(hidden, rules.merge**2, outputs)

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Features [tokens, outputs] of an image [height, width, 3] u8, row by row."""
        rows, columns = self.rules.grid(*pixels.shape[:2])
        x = self.patch_embed["proj"](patches(pixels, self.rules))
        by = rotations(rows, columns, self.rules.merge, self.dim, x.device)
        windows = self._windows(rows, columns, x)
        for index, block in enumerate(self.blocks):
            x = block(x, by, None if index in self.whole_layers else windows)
            yield
        return self.merger(x)

    def _windows(self, rows: int, columns: int, x: Tensor) -> Windows:
        """Lay patches x [N, hidden] out in windows, without waiting for a GPU."""
        size, count = self.window, self.rules.merge**2
        tokens = torch.arange(rows * columns, device=x.device).view(rows, columns)
        tokens = pad(tokens, (0, -columns % size, 0, -rows % size), value=rows * columns)
        tokens = tokens.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2).reshape(-1, size * size, 1)
        patches = (tokens * count + torch.arange(count, device=x.device)).flatten(1)
        # Places beyond the border are those of a patch behind the last one, or of the next.
        beyond, slots = patches >= len(x), torch.arange(patches.numel(), device=x.device)
        places = torch.empty(len(x) + count, dtype=torch.int64, device=x.device).scatter_(0, patches.flatten(), slots)
        bias = None
        if rows % size or columns % size:
            bias = torch.zeros_like(beyond, dtype=x.dtype).masked_fill_(beyond, float("-inf"))[:, None, None]
        return Windows(patches.clamp(max=len(x) - 1), bias, places[: len(x)])


def patches(pixels: Tensor, rules: Rules) -> Tensor:
    """An image's patches [N, 3, patch, patch] f32: those that become one token follow each other."""
    patch, merge = rules.patch, rules.merge
    rows, columns = rules.grid(*pixels.shape[:2])
    x = normalised(pixels, rules).view(3, rows, merge, patch, columns, merge, patch)
    return x.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, patch, patch)


def in_order(grid: Tensor, merge: int) -> Tensor:
    """The values [rows of patches, columns of patches, …] of patches in their order, [N, …]."""
    blocks = grid.unflatten(0, (-1, merge)).unflatten(2, (-1, merge))
    return blocks.transpose(1, 2).flatten(0, 3)


def rotations(rows: int, columns: int, merge: int, dim: int, device: torch.device) -> Rotation:
    """How patches are turned: half of a head by the patch's row, half by its column."""
    at = torch.meshgrid(*(torch.arange(n * merge, device=device) for n in (rows, columns)), indexing="ij")
    return rotation((in_order(torch.stack(at, 2), merge)[..., None] * frequencies(1e4, dim // 2, device)).flatten(1))


def positions(length: int, pictures: Sequence[Picture]) -> np.ndarray:
    """M-RoPE's positions of a prompt [3, length] int64: in time, by row and by column. Behind an image they go on with
    the first that is larger than any of its own."""
    found = np.empty((3, length), np.int64)
    at = position = 0
    for one in (*pictures, None):
        start = length if one is None else one.start
        found[:, at:start] = position + np.arange(start - at)
        position += start - at
        if one is not None:
            at = start + one.length
            found[:, start:at] = position + np.stack(
                (np.zeros(one.length, np.int64), *np.divmod(np.arange(one.length), one.columns))
            )
            position += max(one.rows, one.columns)
    return found
