"""FP8 experts on Hopper: by tensor cores of 8 bits, next to what else multiplies them, and each part in every config.

    python benchmarks/ops_e4m3_experts.py [--shapes qwen3-30b-a3b] [--rows 64 256 2048] [--unit 128] [--json FILE]

One line by number of rows has whole layers, without the sum over a token's experts: bf16; FP8 as it is chosen, by tiles
of quantized_experts.cu, dequantised first. The next ones have the parts: the sort of routed tokens, rows that become
e4m3, and both GEMMs by config: outputs x rows of a tile / rows of a matmul, and blocks that share x. The limit is that
of bytes in FP8, or twice the arithmetic of bf16. Rows choose experts at random. --unit: inputs that share a scale; 0:
as with `--isq fp8`, 128: as in checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from phalanx.benchmarks.ops_moe import SHAPES, Layers, by_plain_kernels, variant
from phalanx.benchmarks.ops_table import Table
from phalanx.benchmarks.timing import Call
from phalanx.kernels import jit
from phalanx.kernels.device import DeviceCaps, device_caps
from phalanx.kernels.moe import moe, quantized_experts
from phalanx.kernels.moe.group import encode_routed, group
from phalanx.kernels.moe.moe import Inputs
from phalanx.kernels.moe.quantized_experts import Gemm
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


def configs(routed: float) -> Iterator[E4m3Config]:
    """Tiles that may be the fastest for so many routed tokens per expert."""
    return (config for config in TILES if config.rows <= max(32, 4 * routed) and config.rows * 8 >= min(routed, 512))


def name(config: E4m3Config) -> str:
    return f"{config.outputs}x{config.rows}/{config.n}" + (f" share {config.share}" if config.share > 1 else "")


def stacks(layers: Layers, unit: int) -> list[tuple[Stack, Stack]]:
    """Times of two copies."""

    def made(weights: Tensor) -> Stack:
        def encode(expert: int) -> tuple[Tensor, Tensor]:
            one = weights[expert]
            return e4m3.encode_reference(one, unit or e4m3.unit_of(one.shape[1]))

        experts, outputs, inputs = weights.shape
        return stack(e4m3, encode, (experts, outputs, inputs))

    return [(made(a), made(b)) for a, b in list(zip(layers.w13, layers.w2, strict=True))[:2]]


def caps() -> DeviceCaps:
    return device_caps(torch.device("cuda"))


def chosen(routed: int, experts: int, w13: Stack, w2: Stack) -> quantized_experts.Configs:
    """The config chosen for tensor cores of 8 bits."""
    found = quantized_experts.choose_e4m3(routed, experts, w13, w2, caps())
    assert found is not None, "not a Hopper"
    return found


def whole(bf16: list[Inputs], given: list[Inputs]) -> dict[str, list[Call]]:
    """Layers."""
    one = given[0]
    assert isinstance(one.w13, Stack) and isinstance(one.w2, Stack)
    versions: dict[str, list[Call]] = {
        "bf16": [partial(moe.expert_terms, one) for one in bf16],
        "chosen": [partial(moe.expert_terms, one) for one in given],
        "dequantised": [partial(by_plain_kernels, one) for one in given],
    }
    if one.routed <= moe.PLAIN_ROUTED * one.experts:
        kernels = quantized_experts.choose_tiled(one.routed, one.experts, one.w13, one.w2, caps())
        versions[f"tiles of {kernels.rows}"] = [partial(quantized_experts.experts, one, kernels) for one in given]
    kernels = chosen(one.routed, one.experts, one.w13, one.w2)
    versions[f"8 bits, tiles of {kernels.rows}"] = [partial(quantized_experts.experts, one, kernels) for one in given]
    return versions


def parts(given: list[Inputs]) -> dict[str, dict[str, list[Call]]]:
    """Parts of a layer by tensor cores of 8 bits."""
    top, experts = given[0].ids.shape[1], given[0].experts
    found: dict[str, dict[str, list[Call]]] = {
        "rows": {"sort": [partial(group, one.ids, experts, 32) for one in given]},
        "up": {},
        "down": {},
    }
    y = given[0].x.new_empty(given[0].routed, given[0].x.shape[1])
    for config in configs(given[0].routed / experts):
        of: dict[str, list[Call]] = {"of x": [], "of h": [], "up": [], "down": []}
        for one in given:
            assert isinstance(one.w13, Stack) and isinstance(one.w2, Stack)
            groups = group(one.ids, experts, config.rows)
            h = torch.randn(one.routed, one.w2.shape[2], device="cuda").to(one.x.dtype)
            of_x = partial(encode_routed, one.x, groups, one.weights, top, 256)
            of_h = partial(encode_routed, h, groups, one.weights, 0, 256)
            of["of x"].append(of_x)
            of["of h"].append(of_h)
            up = Gemm(one.x, one.w13, groups, one.weights, torch.empty_like(h), "silu", top, None)
            down = Gemm(h, one.w2, groups, one.weights, y, "", 0, None)
            of["up"].append(partial(quantized_experts.by_e4m3, up, config, of_x()))
            of["down"].append(partial(quantized_experts.by_e4m3, down, config, of_h()))
        found["rows"] |= {part: of[part] for part in ("of x", "of h")}
        found["up"][name(config)], found["down"][name(config)] = of["up"], of["down"]
    return found


def compile_ahead(given: list[Inputs], rows: list[int]) -> None:
    w13, w2 = given[0][3:5]
    assert isinstance(w13, Stack) and isinstance(w2, Stack)
    top, experts, programs = given[0].ids.shape[1], given[0].experts, []
    for n in rows:
        used: set[quantized_experts.Config] = {*configs(n * top / experts), *chosen(n * top, experts, w13, w2)}
        tiled = quantized_experts.choose_tiled(n * top, experts, w13, w2, caps())
        for config in used | {tiled.up}:
            programs.append(variant(w13, config, "silu", top))
        for config in used | {tiled.down}:
            programs.append(variant(w2, config, "", 1))
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
