"""The gated delta net's convolution and rule, and Mamba-2's decode steps, next to the least time that their bytes or
their arithmetic take.

    python benchmarks/ops_delta.py [--key-heads 16] [--value-heads 32] [--only prompt] [--json FILE]

Sizes are Qwen3-Next's, heads a rank's, and Nemotron 3 Nano's. The byte limit counts inputs, outputs and each state once
in and once out. The arithmetic limit counts multiply-adds of chunks of 64 tokens: each token's with a state, with the
other tokens of its chunk, and of the chunk's inverse. As in ops.py, calls rotate over inputs that do not fit in the
GPU's cache together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from phalanx.benchmarks.ops_table import Table, copies, make_rows, randn
from phalanx.benchmarks.timing import Call
from phalanx.kernels.recurrent import gated_delta
from phalanx.kernels.recurrent.gated_delta import CHUNK, DeltaSizes, Gates
from phalanx.kernels.recurrent.ssd import SsdSizes, TimeSteps, ssd
from torch import Tensor

TAPS = 4
DECODES = 1, 16, 64, 256
PROMPTS = [1024], [8192], [32768], [1024] * 8, [1] * 64 + [8128]  # tokens of each sequence of a step


def states_of(sizes: DeltaSizes, count: int) -> tuple[Tensor, Tensor]:
    state = torch.zeros(count, sizes.value_heads, sizes.key_dim, sizes.value_dim, device="cuda")
    return torch.zeros(count, TAPS - 1, sizes.channels, device="cuda"), state


def step(table: Table, sizes: DeltaSizes, name: str, counts: list[int]) -> None:
    rows, _ = make_rows(counts, [n + 8 for n in counts])
    rows.rows = torch.randperm(len(counts), device="cuda")
    tokens, heads = sum(counts), sizes.value_heads
    moved = tokens * 2 * (sizes.channels + sizes.values + 2 * heads)
    moved += len(counts) * heads * sizes.key_dim * sizes.value_dim * 8
    inputs = [(randn(tokens, sizes.channels), *states_of(sizes, len(counts))) for _ in range(min(4, copies(moved)))]
    decay = torch.zeros(heads, device="cuda"), randn(heads).float()
    gates = Gates(randn(tokens, heads), randn(tokens, heads), *decay)
    weight = randn(sizes.channels, TAPS)

    def convs(call: Callable[..., Any]) -> list[Call]:
        return [partial(call, x, weight, convolution, rows) for x, convolution, _ in inputs]

    def rules(call: Callable[..., Any]) -> list[Call]:
        return [partial(call, x, gates, state, rows, sizes) for x, _, state in inputs]

    bytes_ = tokens * 4 * sizes.channels + len(counts) * 8 * (TAPS - 1) * sizes.channels
    table.add(
        f"delta conv {name}", bytes_,
        {"ours": convs(gated_delta.causal_conv), "torch": convs(gated_delta.causal_conv_reference)}, least=2,
    )  # fmt: skip
    key, value = sizes.key_dim, sizes.value_dim
    many = 0 if max(counts) == 1 else tokens
    flops = 2.0 * many * heads * (3 * key * value + CHUNK * (3 * key + 2 * value) + 4 * CHUNK * CHUNK)
    table.add(
        f"delta rule {name}", moved,
        {"ours": rules(gated_delta.gated_delta), "torch": rules(gated_delta.gated_delta_reference)}, flops, least=2,
    )  # fmt: skip


def mamba_step(table: Table, sizes: SsdSizes, count: int) -> None:
    """A step of sequences that decode."""
    rows, _ = make_rows([1] * count, [9] * count)
    rows.rows = torch.randperm(count, device="cuda")
    moved = count * (sizes.heads * sizes.state * sizes.head_dim * 8 + 2 * (sizes.channels + sizes.values + sizes.heads))
    heads = (randn(sizes.heads).float() for _ in range(3))
    times = TimeSteps(randn(count, sizes.heads), *heads)
    inputs = [
        (randn(count, sizes.channels), torch.zeros(count, 1, sizes.heads, sizes.state, sizes.head_dim, device="cuda"))
        for _ in range(min(4, copies(moved)))
    ]
    calls: list[Call] = [partial(ssd, xbc, times, state, rows, sizes) for xbc, state in inputs]
    table.add(f"mamba-2 decode {count}", moved, {"ours": calls}, least=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--key-heads", type=int, default=16, help="of one rank")
    parser.add_argument("--value-heads", type=int, default=32, help="of one rank")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    torch.manual_seed(0)
    table, sizes = Table(asked.only), DeltaSizes(asked.key_heads, asked.value_heads, 128, 128)
    with torch.no_grad():
        for batch in DECODES:
            step(table, sizes, f"decode {batch}", [1] * batch)
            mamba_step(table, SsdSizes(8, 64, 128, 64), batch)
        for counts in PROMPTS:
            parts = (f"{counts.count(n)} x {n}" for n in sorted(set(counts)))
            step(table, sizes, "prompt " + " and ".join(parts), counts)
    table.append(asked.json, sizes=sizes)


if __name__ == "__main__":
    main()
