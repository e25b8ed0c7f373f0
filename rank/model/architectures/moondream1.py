"""Moondream 2 (vikhyatk/moondream2, revisions of 2025): Phi's layers behind an image; captions, answers to questions
about it, and points and boxes of objects in it.

An object is a token for each coordinate of its middle and, of a box, one for its size: beyond the vocabulary, chosen by
heads and embedded by linears of their own. config.json has only those of its sizes that differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ...vision.moondream1 import FIRST, SIZE, Rules, extent
from .. import base
from ..base import Count
from ..batch import Batch
from ..shard import whole
from ..vision import moondream1
from ..vision._tower import FeedForward, Replicated
from ..weights.slicing import Field, ShardedModule, parameter
from . import phi

CONFIG = {
    "names": {
        "config.text.dim": "hidden_size",
        "config.text.ff_dim": "intermediate_size",
        "config.text.n_layers": "num_hidden_layers",
        "config.text.n_heads": "num_attention_heads",
        "config.text.n_kv_heads": "num_key_value_heads",
        "config.text.vocab_size": "vocab_size",
        "config.text.max_context": "max_position_embeddings",
        "config.text.group_size": "group_size",
        "config.region.coord_feat_dim": "coord_feat_dim",
        "config.region.size_feat_dim": "size_feat_dim",
        "config.region.inner_dim": "region_inner_dim",
        "config.vision": "vision_config",
    },
    "defaults": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "vocab_size": 51200, "partial_rotary_factor": 0.5, "vision_config": {},
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Args(base.SeeingArgs, phi.Args):
    vision_config: dict[str, Any] = field(default_factory=dict)
    group_size: int | None = None
    coord_feat_dim: Count = 256
    size_feat_dim: Count = 512
    region_inner_dim: Count = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        base.expect("config.text.group_size", self.group_size, None)  # of the revisions in 4 bits


class Frequencies(ShardedModule):
    """Fourier features (Tancik et al. 2020, arXiv 2006.10739) of rows of few numbers."""

    fields = (Field("weight", "io"),)

    def __init__(self, numbers: int, features: int):
        super().__init__()
        self.inputs, self.outputs = whole(numbers), (whole(features // 2),)
        self.weight = parameter(numbers, features // 2)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, numbers] f32, from 0 to 1. Returns [T, features] of the model's dtype."""
        angles = 2 * math.pi * (x @ self.weight.float())
        return torch.cat((angles.cos(), angles.sin()), 1).to(self.weight.dtype)


class Region(nn.Module):
    """Heads and embeddings of coordinates and sizes. Every rank of the last and of the first stage has them whole."""

    def __init__(self, args: Args, mesh: Mesh, rules: Rules):
        super().__init__()
        self.rules = rules
        hidden, inner, activation = args.hidden_size, args.region_inner_dim, moondream1.ACTIVATION
        if mesh.first:
            self.coord_features = Frequencies(1, args.coord_feat_dim)
            self.coord_encoder = Replicated(args.coord_feat_dim, hidden)
            self.size_features = Frequencies(2, args.size_feat_dim)
            self.size_encoder = Replicated(args.size_feat_dim, hidden)
        if mesh.last:
            self.coord_decoder = FeedForward(hidden, inner, activation, rules.coordinates)
            self.size_decoder = FeedForward(hidden, inner, activation, 2 * rules.sizes)

    def embed(self, ids: Tensor) -> Tensor:
        """[T, hidden] of tokens [T]; those of the vocabulary get any."""
        beyond = (ids - self.rules.vocabulary).clamp(min=0)
        coordinate = (beyond.clamp(max=self.rules.coordinates - 1) / self.rules.coordinates)[:, None]
        pair = (beyond - self.rules.coordinates).clamp(min=0)
        size = torch.stack((pair // self.rules.sizes, pair % self.rules.sizes), 1)
        return torch.where(
            (beyond < self.rules.coordinates)[:, None],
            self.coord_encoder(self.coord_features(coordinate)),
            self.size_encoder(self.size_features(extent(size, self.rules.sizes))),
        )

    def choose(self, hidden: Tensor, ids: Tensor, heads: Tensor) -> Tensor:
        """The tokens [S] of rows [S, hidden], as Model.choose has them."""
        coordinate = self.coord_decoder(hidden).argmax(1)
        width, height = self.size_decoder(hidden).unflatten(1, (2, -1)).argmax(2).unbind(1)
        size = self.rules.coordinates + width * self.rules.sizes + height
        found = self.rules.vocabulary + torch.where(heads == SIZE, size, coordinate)
        ends = (heads == FIRST) & (ids == self.rules.placeholder)
        return torch.where((heads == 0) | ends, ids, found)


class Decoder(base.Decoder):
    def __init__(self, args: Any, mesh: Mesh, layer: type[base.Layer]):
        super().__init__(args, mesh, layer)
        rules = cast(Rules | None, args.rules)  # None: images are not taken
        self.region = Region(args, mesh, rules) if rules is not None and (mesh.first or mesh.last) else None

    def embed(self, batch: Batch) -> Tensor:
        if not batch.beyond or self.region is None:
            return super().embed(batch)
        assert self.embed_tokens is not None
        ids, last = batch.ids, self.region.rules.vocabulary - 1
        x = torch.where((ids <= last)[:, None], self.embed_tokens(ids.clamp(max=last)), self.region.embed(ids))
        if batch.embeddings is not None:
            x[batch.embeddings.at] = batch.embeddings.values
        return x


class Model(base.SeeingModel, phi.Model):
    DECODER, TOWER = Decoder, moondream1.Tower
    PREFIXES = {"model.text.": "model.", "text.": "model.", "model.vision.": "vision.", "region.": base.REGION}
    MERGED = phi.Model.MERGED | {
        "o_proj": ("proj",), "out_proj": ("proj",), "layer_norm1": ("ln1",), "layer_norm2": ("ln2",),
    }  # fmt: skip
    RENAMED = {
        "model.wte": "model.embed_tokens.weight",
        "model.blocks.": "model.layers.",
        "model.post_ln.": "model.norm.",
        "model.lm_head.": "lm_head.",
        "vision.pos_emb": "vision.pos_emb.weight",
        "_features": "_features.weight",
        ".ln.": ".input_layernorm.",
        ".attn.": ".self_attn.",
        ".qkv.": ".qkv_proj.",
    }

    def choose(self, hidden: Tensor, ids: Tensor, heads: Tensor) -> Tensor:
        region = cast(Decoder, self.model).region
        assert region is not None
        return region.choose(hidden, ids, heads)
