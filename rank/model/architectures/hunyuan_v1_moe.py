"""Hunyuan with experts: A13B (Tencent 2025): dense Hunyuan's layers with experts, and one that all tokens visit."""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import MODEL, FatalError
from ....kernels.moe.router import RouterParams
from ..layers.feed_forward import Experts
from . import hunyuan_v1_dense


@dataclass(frozen=True, kw_only=True)
class Args(hunyuan_v1_dense.Args):
    num_experts: int = 1
    moe_topk: int | list[int] = 1  # of all layers, or of each

    def router(self, index: int) -> RouterParams:
        top = self.moe_topk
        if isinstance(top, int):
            return RouterParams(top)
        if index >= len(top):
            raise FatalError(f"config.json: moe_topk has {len(top)} entries, and none for layer {index}", MODEL)
        return RouterParams(top[index])

    def feed_forward(self, index: int) -> Experts:
        inner = self.intermediate_size
        return Experts(inner, self.num_experts, self.router(index), self.hidden_act, inner)


class Model(hunyuan_v1_dense.Model):
    RENAMED = hunyuan_v1_dense.Model.RENAMED | {
        ".mlp.gate.wg.": ".mlp.gate.",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    }
