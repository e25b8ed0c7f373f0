"""Granite 3 with experts (IBM 2024): Granite with experts in place of the feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

from . import granite, llama, mixtral


@dataclass(frozen=True, kw_only=True)
class Args(granite.Args):
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    feed_forward = mixtral.Args.feed_forward


class Model(llama.Model):
    RENAMED = {
        ".block_sparse_moe.router.layer.": ".mlp.gate.",
        ".block_sparse_moe.router.": ".mlp.gate.",
        ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
        ".block_sparse_moe.": ".mlp.",
    }
