"""FP8 experts on Hopper: by tensor cores of 8 bits, beside what else multiplies them, and each part in every config.

    python benchmarks/ops_e4m3_experts.py [--shapes qwen3-30b-a3b] [--rows 64 256 2048] [--unit 128] [--json FILE]

One line by number of rows has whole layers, without the sum over a token's experts: bf16; FP8 as it is chosen, by tiles
of quantized_experts.cu, dequantised first. The next ones have the parts: the sort of pairs, rows that become e4m3, and
both GEMMs by config: outputs x rows of a tile / rows of a matmul, and blocks that share x. The limit is that of
bytes in FP8, or twice the arithmetic of bf16. Rows choose experts at random. --unit: inputs that share a scale; 0: as
with `--isq fp8`, 128: as in checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from phalanx.benchmarks.ops_moe import SHAPES, Layers
from phalanx.benchmarks.ops_table import Table
from phalanx.benchmarks.timing import Call
from phalanx.kernels import jit
from phalanx.kernels.device import device_caps
from phalanx.kernels.moe import e4m3_experts, e4m3_pairs, moe, quantized_cuda, quantized_experts
from phalanx.kernels.moe.group import group
from phalanx.kernels.moe.moe import Inputs
from phalanx.kernels.quantized import e4m3
from phalanx.kernels.quantized.e4m3_wgmma import E4m3Config
from phalanx.kernels.quantized.stack import Stack, stack
from torch import Tensor

ROWS = 64, 128, 256, 512, 2048, 8192
TILES = (
    E4m3Config(128, 16, 1, matmul=16), E4m3Config(128, 32, 1), E4m3Config(128, 32, 1, 2), E4m3Config(256, 32, 1),
    E4m3Config(128, 64, 1), E4m3Config(128, 64, 1, 2), E4m3Config(192, 64, 1), E4m3Config(128, 128, 1),
    E4m3Config(128, 128, 1, 2), E4m3Config(192, 128, 1), E4m3Config(192, 128, 1, 2),
    E4m3Config(128, 192, 1, matmul=192), E4m3Config(128, 192, 1, 2, matmul=192), E4m3Config(128, 192, 1, 2, matmul=96),
    E4m3Config(128, 256, 1, matmul=128), E4m3Config(128, 256, 1, 2, matmul=128),
)  # fmt: skip


def configs(pairs: float) -> Iterator[E4m3Config]:
    """Those that may be the fastest of so many pairs per expert."""
    return (config for config in TILES if config.rows <= max(32, 4 * pairs) and config.rows * 8 >= min(pairs, 512))


def name(config: E4m3Config) -> str:
    return f"{config.outputs}x{config.rows}/{config.n}" + (f" share {config.share}" if config.share > 1 else "")


def stacks(layers: Layers, unit: int) -> list[tuple[Stack, Stack]]:
    """Of two copies."""

    def made(weights: Tensor) -> Stack:
        def encode(expert: int) -> tuple[Tensor, Tensor]:
            one = weights[expert]
            return e4m3.encode_reference(one, unit or e4m3.unit_of(one.shape[1]))

        experts, outputs, inputs = weights.shape
        return stack(e4m3, encode, (experts, outputs, inputs))

    return [(made(a), made(b)) for a, b in list(zip(layers.w13, layers.w2, strict=True))[:2]]


def whole(bf16: list[Inputs], given: list[Inputs]) -> dict[str, list[Call]]:
    """Layers."""
    one = given[0]
    assert isinstance(one.w13, Stack) and isinstance(one.w2, Stack)
    versions: dict[str, list[Call]] = {
        "bf16": [partial(moe.expert_terms, one) for one in bf16],
        "chosen": [partial(moe.expert_terms, one) for one in given],
        "dequantised": [partial(moe.grouped, one) for one in given],
    }
    if one.pairs <= 96 * one.experts:
        tiles = quantized_experts.choose_tiles(one.pairs, one.experts)
        kernels = quantized_cuda.tiled_configs(tiles, one.w13, one.w2)
        versions[f"tiles of {8 * tiles}"] = [partial(moe.in_pieces, one, kernels) for one in given]
    up, down = e4m3_experts.choose(one.pairs, one.experts)
    versions[f"8 bits, tiles of {up.rows}"] = [
        partial(moe.in_pieces, one, quantized_cuda.KernelConfigs(up, down)) for one in given
    ]
    return versions


def parts(given: list[Inputs]) -> dict[str, dict[str, list[Call]]]:
    """What a layer by tensor cores of 8 bits consists of."""
    top, experts = given[0].ids.shape[1], given[0].experts
    found: dict[str, dict[str, list[Call]]] = {
        "rows": {"sort": [partial(group, one.ids, experts, 32) for one in given]},
        "up": {},
        "down": {},
    }
    y = given[0].x.new_empty(given[0].pairs, given[0].x.shape[1])
    for config in configs(given[0].pairs / experts):
        of: dict[str, list[Call]] = {"of x": [], "of h": [], "up": [], "down": []}
        for one in given:
            assert isinstance(one.w13, Stack) and isinstance(one.w2, Stack)
            groups = group(one.ids, experts, config.rows)
            h = torch.randn(one.pairs, one.w2.shape[2], device="cuda").to(one.x.dtype)
            of_x = partial(e4m3_pairs.encode, one.x, groups, one.weights, top, 256)
            of_h = partial(e4m3_pairs.encode, h, groups, one.weights, 0, 256)
            of["of x"].append(of_x)
            of["of h"].append(of_h)
            of["up"].append(
                partial(e4m3_experts.multiply, of_x(), one.w13, groups, torch.empty_like(h), "silu", config)
            )
            of["down"].append(partial(e4m3_experts.multiply, of_h(), one.w2, groups, y, "", config))
        found["rows"] |= {part: of[part] for part in ("of x", "of h")}
        found["up"][name(config)], found["down"][name(config)] = of["up"], of["down"]
    return found


def compile_ahead(given: list[Inputs], rows: list[int]) -> None:
    w13, w2 = given[0][3:5]
    assert isinstance(w13, Stack) and isinstance(w2, Stack)
    top, experts, found = given[0].ids.shape[1], given[0].experts, device_caps(torch.device("cuda"))
    programs = []
    for n in rows:
        used = {*configs(n * top / experts), *e4m3_experts.choose(n * top, experts)}
        sizes = [
            e4m3_experts.sizes(one, config, act, False) for config in used for one, act in ((w13, "silu"), (w2, ""))
        ]
        programs += [jit.variant("e4m3_experts", torch.bfloat16, **one) for one in sizes]
        tiles = quantized_experts.choose_tiles(n * top, experts)
        for kernels in (
            quantized_cuda.tiled_configs(tiles, w13, w2),
            quantized_cuda.choose_kernels(n * top, experts, w13, w2, found),
        ):
            for weight, kernel, act, k in ((w13, kernels.up, "silu", top), (w2, kernels.down, "", 1)):
                if isinstance(kernel, quantized_experts.ExpertTileConfig):
                    of = quantized_experts.sizes(weight, kernel, act, k, False)
                    programs.append(jit.variant("quantized_experts", torch.bfloat16, **of))
    jit.compile_ahead(programs, torch.device("cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--unit", type=int, default=0, help="inputs that share a scale; 0: as --isq fp8")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    torch.manual_seed(0)
    table = Table("")
    with torch.no_grad():
        layers = Layers(SHAPES[asked.shapes])
        quantised = stacks(layers, asked.unit)
        for i, rows in enumerate(asked.rows):
            bf16 = layers.calls(rows)[:4]
            given = [Inputs(*one[:3], *quantised[j % 2]) for j, one in enumerate(bf16)]
            if i == 0:
                compile_ahead(given, asked.rows)
            bytes_, flops = layers.limits(bf16)
            about = f"{rows}x{bf16[0].x.shape[1]}x{bf16[0].w2.shape[2]} top {bf16[0].ids.shape[1]}"
            table.add(f"experts {about}", bytes_ * 33 / 64, whole(bf16, given), flops / 2)
            for part, versions in parts(given).items():
                table.add(f"{part} {about}", 0, versions)
    table.append(asked.json)


if __name__ == "__main__":
    main()
