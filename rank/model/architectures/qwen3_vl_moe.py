"""Qwen3-VL with experts (Qwen team 2025, arXiv 2511.21631): Qwen3's experts that see."""

from __future__ import annotations

from dataclasses import dataclass

from .. import base
from ..formats._stacks import ExpertLayout
from ..layers.feed_forward import Experts, FeedForward
from . import qwen3_5, qwen3_moe

CONFIG = {"text_type": "qwen3_vl_moe_text", "defaults": {"rope_theta": 500000.0}}


@dataclass(frozen=True, kw_only=True)
class Args(base.SeeingArgs, qwen3_moe.Args):
    norm_topk_prob: bool = True

    def feed_forward(self, index: int) -> FeedForward:
        made = super().feed_forward(index)
        return made._replace(layout=ExpertLayout("eio")) if isinstance(made, Experts) else made


class Model(base.SeeingModel, qwen3_moe.Model):
    PREFIXES, TOWER = qwen3_5.Model.PREFIXES, qwen3_5.Model.TOWER
    image_positions = staticmethod(qwen3_5.Model.image_positions)
