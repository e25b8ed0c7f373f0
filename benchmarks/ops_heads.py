"""Attention by head size: the CUDA kernels next to Triton's, and cuDNN's where it takes whole prompts.

    python benchmarks/ops_heads.py [--dims 80 96 128] [--json FILE]

Microseconds of a call, in bf16 and without rotation: of decoding sequences over caches of which no two calls in a row
read the same one, and of a prompt. The limit is that of bytes or of arithmetic.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from phalanx.benchmarks.ops_table import Table, copies, make_rows, randn
from phalanx.benchmarks.timing import Call
from phalanx.kernels.attention.attention import CANDIDATES
from phalanx.kernels.attention.backend import AttentionParams, Part

# Head size → query and key heads, as models have them: Phi-2 has 80, Phi-3-mini 96, StableLM-2-12B 160.
HEADS = {64: (32, 8), 80: (32, 32), 96: (32, 32), 112: (32, 8), 128: (32, 8), 160: (32, 8), 192: (32, 8), 256: (16, 8)}
DECODED = (1, 8192), (64, 1024)  # sequences x tokens
PROMPT = 4096


def add(table: Table, dim: int, query_lens: list[int], kv_lens: list[int]) -> None:
    heads, kv_heads = HEADS[dim]
    rows, blocks = make_rows(query_lens, kv_lens)
    tokens, bytes_ = sum(query_lens), 4 * blocks * 16 * kv_heads * dim
    q, params = randn(tokens, heads, dim), AttentionParams(dim**-0.5)
    caches = [(randn(blocks, 16, kv_heads, dim), randn(blocks, 16, kv_heads, dim)) for _ in range(copies(bytes_))]
    parts = [Part(q, *cache, rows, params, 0, len(kv_lens), torch.empty_like(q)) for cache in caches]
    calls: dict[str, list[Call]] = {
        one.name: [partial(one.run, part) for part in parts] for one in CANDIDATES["cuda"] if one.supports(parts[0])
    }
    pairs = sum(count * (length - (count - 1) / 2) for count, length in zip(query_lens, kv_lens, strict=True))
    what = "decode" if rows.num_decodes else "prompt"
    name = f"{what} {len(kv_lens)} x {max(kv_lens)}, {heads}/{kv_heads} heads of {dim}"
    table.add(name, bytes_, calls, 4 * pairs * heads * dim)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream())
    table = Table("")
    for dim in asked.dims:
        for sequences, length in DECODED:
            add(table, dim, [1] * sequences, [length] * sequences)
        add(table, dim, [PROMPT], [PROMPT])
    table.append(asked.json)


if __name__ == "__main__":
    main()
