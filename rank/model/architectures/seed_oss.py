"""Seed-OSS (ByteDance 2025): Llama with biases of queries, keys and values, and a switch for the output's."""

from __future__ import annotations

from dataclasses import dataclass

from . import llama

CONFIG = {"names": {"attention_out_bias": "o_bias"}, "defaults": {"head_dim": 128}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    attention_bias: bool = True
    o_bias: bool = False


Model = llama.Model
