"""Decode and prefill with experts in host memory: tokens/s, and how experts were served.

    python benchmarks/offload.py --offload 0,64,128
    python benchmarks/offload.py --offload 64,128 --isq q4km
    python benchmarks/offload.py --offload 64 --zipf 0.8 --placement cpu
    python benchmarks/offload.py DIR --offload 8 --device cpu     # the shape of DIR's config.json

Weights are random, of Qwen3-30B-A3B unless a directory is given. A router with random weights chooses experts nearly
evenly, which is the worst case. `--zipf S` has them drawn instead: in each layer the i-th most popular of them with a
weight of i ** -S, in an order of its own. 0.8 is about the skew of real models. Each number in --offload is a job.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from phalanx.benchmarks import step
from phalanx.rank.model.base import Model
from phalanx.rank.model.layers.moe import Router
from phalanx.rank.options import Options
from phalanx.rank.scheduler.replica import Replica
from torch import Tensor

ZIPF = "PHALANX_BENCH_ZIPF"  # the exponent, for the ranks
DRAWS = 1 << 13  # choices of a layer, which are used in turn
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip


class OffloadRank(step.BenchRank):
    def lead(self, replicas: list[Replica], model: Model) -> int:
        code = super().lead(replicas, model)
        if model.offload is not None:
            step.say(what="experts", **vars(model.offload.counters))
        return code


def draw(exponent: float, experts: int, k: int, seed: int) -> Tensor:
    """[DRAWS, k] int32: k different experts each, by the Gumbel trick."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(experts, generator=generator)
    scores = -exponent * torch.arange(1, experts + 1).log()
    noise = -(-torch.rand(DRAWS, experts, generator=generator).log()).log()
    return order[(scores + noise).topk(k).indices].int()


def route_by_zipf(exponent: float) -> None:
    """Replace every router's choice. What it needs lies on the device, so that steps are captured with it."""
    made = 0

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal made
        k = self.params.top_k
        if not hasattr(self, "drawn"):
            made += 1
            self.drawn = draw(exponent, len(self.weight), k, made).to(x.device)
            self.turn = torch.zeros(1, dtype=torch.int64, device=x.device)
            self.every = torch.arange(DRAWS, device=x.device)
        rows = (self.every[: len(x)] + self.turn) % DRAWS
        self.turn += len(x)
        return self.drawn[rows], x.new_full((len(x), k), 1 / k, dtype=torch.float32)

    Router.forward = forward  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="a directory with a config.json")
    parser.add_argument("--offload", default="0,64,128", help="experts of a layer in host memory alone: N,..; 0: none")
    parser.add_argument("--placement", default="auto", choices=("auto", "resident", "cpu", "stream"))
    parser.add_argument("--zipf", type=float, help="exponent of the experts' popularity")
    parser.add_argument("--isq", default="none", help="what linears and experts are quantised to, such as q4km")
    parser.add_argument("--np", type=int, default=1, help="ranks")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--batches", default="1,16", help="sequences that decode together")
    parser.add_argument("--prompt", type=int, default=128, help="their prompts' tokens")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to take the median of")
    parser.add_argument("--prefill", type=step.pairs, default=[(1, 8192)], help="SEQUENCESxTOKENS,..")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    if asked.zipf is not None:
        os.environ[ZIPF] = str(asked.zipf)
    batches = [int(b) for b in asked.batches.split(",")]
    ask = step.Ask(batches, asked.prompt, asked.steps, asked.prefill)
    with tempfile.TemporaryDirectory() as made:
        Path(made, "config.json").write_text(json.dumps(QWEN3_30B_A3B))
        for offload in map(int, asked.offload.split(",")):
            options = Options(
                model=asked.model or made,
                ranks=asked.np,
                device=asked.device,
                load_format="dummy",
                prefix_cache=False,
                max_num_seqs=max(batches),
                num_experts_offload_per_rank=offload,
                isq=asked.isq,
                expert_placement=asked.placement if offload else "auto",
                timeout=600.0,
            )
            lines = step.start(options, ask, __file__)
            print(f"\n{offload} experts of a layer in host memory alone, {asked.placement}, zipf {asked.zipf}")
            print(step.table(lines))
            print(*(line for line in lines if line["what"] == "experts"))
            if asked.json:
                about = dict(offload=offload, isq=asked.isq, placement=asked.placement, zipf=asked.zipf, np=asked.np)
                with open(asked.json, "a") as file:
                    file.writelines(json.dumps(about | line) + "\n" for line in lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        if ZIPF in os.environ:
            route_by_zipf(float(os.environ[ZIPF]))
        step.become_rank(OffloadRank)
    main()
