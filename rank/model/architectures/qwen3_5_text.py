"""Qwen3.5, dense, text (Qwen team 2026): Qwen3-Next's layers without experts; checkpoints hold the projections of
gated delta nets apart."""

from __future__ import annotations

from .. import base
from ..layers.gated_delta_net import PlainDeltaNet
from . import qwen3_next

CONFIG = {"defaults": {"head_dim": 256, "partial_rotary_factor": 0.25}}

Args = qwen3_next.HybridArgs


class Layer(qwen3_next.Layer):
    DELTA_NET = PlainDeltaNet


class Model(qwen3_next.Model):
    LAYER = Layer
    MERGED = base.Model.MERGED | {"in_proj_ba": ("in_proj_b", "in_proj_a")}
