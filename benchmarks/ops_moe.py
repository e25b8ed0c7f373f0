"""Mixture of experts: router and experts next to the least time their bytes or their arithmetic take.

    python benchmarks/ops_moe.py [--shapes qwen3-30b-a3b] [--rows 1 4 16] [--formats q4_k q8_0] [--tune] [--json FILE]

Rows choose experts at random, each number of rows with several choices. The byte limit counts each expert that is
chosen once, the router, and all rows, in bf16. --formats: the same experts quantised, as files of kernels/quantized/
have it. --tune: the tiles of both of Triton's grouped GEMMs that are the fastest of a few, by number of rows. As in
ops.py, calls rotate over copies of their weights that do not fit in the cache together.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from phalanx.benchmarks.ops_table import BANDWIDTH, FLOPS, Table, randn
from phalanx.benchmarks.timing import Call, measure
from phalanx.kernels import jit
from phalanx.kernels.activation.activation import ACTIVATIONS
from phalanx.kernels.device import device_caps
from phalanx.kernels.moe import expert_mlp, moe, plain_experts, quantized_experts
from phalanx.kernels.moe.group import group
from phalanx.kernels.moe.moe import Inputs
from phalanx.kernels.moe.plain_experts import TileConfig
from phalanx.kernels.moe.router import RouterParams, route
from phalanx.kernels.quantized import affine, e4m3, mxfp4
from phalanx.kernels.quantized.e4m3_wgmma import E4m3Config
from phalanx.kernels.quantized.ggml import CODECS
from phalanx.kernels.quantized.stack import Stack, stack
from torch import Tensor

ROWS = 1, 2, 4, 8, 16, 64, 256, 1024, 8192
CHOICES = 12  # different ones of as many calls
MAX_BYTES = 20e9  # of all copies of the weights


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    inner: int
    gated: bool = True

    @property
    def matrices(self) -> int:
        """Matrices of an expert, each with as many weights."""
        return 3 if self.gated else 2


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "qwen3-30b-a3b-tp2": Shape(128, 8, 2048, 384),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "qwen3-235b-a22b-tp4": Shape(128, 8, 4096, 384),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "nemotron-3-nano": Shape(128, 6, 2688, 1856, gated=False),
    "nemotron-3-nano-tp2": Shape(128, 6, 2688, 928, gated=False),
}


class Layers:
    """Copies of a layer's weights, and what they are called with."""

    def __init__(self, shape: Shape, formats: Sequence[str] = ()):
        self.shape = shape
        experts, _, hidden, inner, gated = shape
        size = experts * shape.matrices * hidden * inner * 2
        count = max(2, min(4, int(MAX_BYTES / size)))
        self.routers = [randn(experts, hidden) * hidden**-0.5 for _ in range(count)]
        self.w13 = [randn(experts, inner * (2 if gated else 1), hidden).mul_(hidden**-0.5) for _ in range(count)]
        self.w2 = [randn(experts, hidden, inner).mul_(inner**-0.5) for _ in range(count)]
        copies = list(zip(self.w13, self.w2, strict=True))[:2]
        self.quantized = {name: [(quantize(a, name), quantize(b, name)) for a, b in copies] for name in formats}

    def calls(self, rows: int) -> list[Inputs]:
        experts, k, hidden, _, gated = self.shape
        act, found = "silu" if gated else "relu2", []
        for i in range(CHOICES if rows < 1024 else 4):
            ids = torch.rand(rows, experts, device="cuda").topk(k, -1).indices.int()
            weights = torch.rand(rows, k, device="cuda").softmax(-1)
            copy = i % len(self.w2)
            found.append(Inputs(randn(rows, hidden), ids, weights, self.w13[copy], self.w2[copy], act, gated=gated))
        return found

    def limits(self, calls: list[Inputs]) -> tuple[float, float]:
        """Bytes and floating-point operations of a call."""
        _, k, hidden, inner, _ = self.shape
        matrices = self.shape.matrices
        touched = sum(len(one.ids.unique()) for one in calls) / len(calls)
        rows = len(calls[0].x)
        bytes_ = touched * matrices * hidden * inner * 2 + 2 * rows * hidden * 2
        return bytes_, 2.0 * rows * k * matrices * hidden * inner


def quantize(weights: Tensor, name: str) -> Stack:
    """name: of a file of kernels/quantized/ that encodes, or fp8, mxfp4, or int4: GPTQ's groups of 128."""
    experts, outputs, inputs = weights.shape
    if name == "int4":
        return stack(affine, lambda expert: int4(weights[expert]), (experts, outputs, inputs))
    if name == "mxfp4":
        codes, scales = zip(*map(e2m1, weights), strict=True)
        made = mxfp4.experts(torch.stack(codes), torch.stack(scales), inputs, weights.dtype)
        assert isinstance(made, Stack), "a multiple of 64 inputs"
        return made
    codec = e4m3 if name == "fp8" else CODECS[name.upper()]
    return stack(codec, lambda expert: codec.encode(weights[expert]), (experts, outputs, inputs))


def e2m1(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two of a byte, and scales e8m0 of a weight [O, I], by the nearest."""
    groups = weight.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2) / 6).log2().ceil().clamp(-127, 127)
    scaled = (groups / exponents.exp2().unsqueeze(2)).flatten(1)
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], device=weight.device)
    codes = (torch.bucketize(scaled.abs(), between) + 8 * (scaled < 0)).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, (exponents + 127).to(torch.uint8)


def int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of a weight [O, I], by the nearest."""
    groups = weight.float().unflatten(1, (-1, 128))
    scales = (groups.abs().amax(2) / 7).half().float()
    codes = (groups / scales.unsqueeze(2)).round().clamp(-8, 7) + 8
    zeros = torch.full(scales.shape, 8, dtype=torch.int16, device=weight.device)
    return codes.flatten(1).to(torch.uint8), scales, zeros


SOURCES: dict[type, str] = {
    quantized_experts.ExpertTileConfig: "quantized_experts",
    quantized_experts.PipelineConfig: "quantized_pipeline",
    quantized_experts.WgmmaExpertsConfig: "quantized_wgmma_experts",
    E4m3Config: "e4m3_experts",
}


def variant(stack: Stack, config: quantized_experts.Config, act: str, top: int) -> jit.KernelVariant:
    return jit.variant(SOURCES[type(config)], torch.bfloat16, **quantized_experts.sizes(stack, config, act, top, False))


def kernels_of(w13: Stack, w2: Stack) -> dict[str, quantized_experts.Configs]:
    """All that take these, but those of e4m3_experts.cu."""
    found = {f"tiles of {8 * tiles}": quantized_experts.tiled(tiles, w13, w2) for tiles in (1, 2, 4, 8)}
    if quantized_experts.choose_wgmma(1, 1, w13, w2, device_caps(torch.device("cuda"))):
        outputs = quantized_experts.OUTPUTS, quantized_experts.MORE_OUTPUTS
        for tile in itertools.product(quantized_experts.WGMMA_TILES.values(), outputs):
            if tile[1] == outputs[0] or tile[0] <= quantized_experts.MAX_ROWS_OF_MORE:
                configs = (quantized_experts.wgmma_config(*tile, one) for one in (w13, w2))
                found["wgmma, tiles of {} by {}".format(*tile)] = quantized_experts.Configs(*configs)
    up, down = (quantized_experts.choose_pipeline(one) for one in (w13, w2))
    return found | {"pipelined": quantized_experts.Configs(up, down)} if up and down else found


def compile_quantized(layers: Layers) -> None:
    """All of `kernels_of`, several at a time."""
    programs, k = [], layers.shape.top_k
    for (w13, w2), *_ in layers.quantized.values():
        for kernels in kernels_of(w13, w2).values():
            programs.append(variant(w13, kernels.up, "silu", k))
            programs.append(variant(w2, kernels.down, "", 1))
    jit.compile_ahead(programs, torch.device("cuda"))


def by_plain_kernels(given: Inputs) -> Tensor:
    """Experts by the kernels that packed weights become plain for, whatever the number of routed tokens."""
    found = device_caps(given.x.device)
    plans = (one.plan(given, found) for one in moe.CANDIDATES[-2:] if one.in_range(given.routed, given.experts))
    return next(run for run in plans if run)()


def router(table: Table, layers: Layers, rows: int) -> None:
    experts, k, hidden, *_ = layers.shape
    x, params = randn(rows, hidden), RouterParams(k)
    table.add(
        f"router {rows}x{hidden} to {k} of {experts}", (experts + rows) * hidden * 2,
        {"ours": [partial(route, x, weight, None, params) for weight in layers.routers]},
    )  # fmt: skip


def experts(table: Table, layers: Layers, rows: int) -> None:
    """Without the sum over a token's experts, which the next norm makes."""
    calls = layers.calls(rows)
    bytes_, flops = layers.limits(calls)
    versions: dict[str, list[Call]] = {"ours": [partial(moe.expert_terms, one) for one in calls]}
    if rows <= 16:
        versions["gemv"] = [partial(plain_experts.gemv, one) for one in calls]
    versions |= {f"tiles of {tiles.up.rows}": [partial(plain_experts.by_triton, one, tiles) for one in calls]
                 for tiles in plain_experts.TILINGS.values()}  # fmt: skip
    average = rows * layers.shape.top_k / layers.shape.experts
    for height, chunk in itertools.product(expert_mlp.TILES.values(), (64, 128)):
        if average < 16 * height and expert_mlp.supports(calls[0].x, calls[0].w13, calls[0].w2):
            name = f"one launch, {8 * height} rows, chunks of {chunk}"
            versions[name] = [partial(expert_mlp.experts, one, height, chunk) for one in calls]
    if plain_experts.wgmma_takes(calls[0], device_caps(torch.device("cuda"))):
        tiles = sorted(set(plain_experts.WGMMA_ROWS.values()))
        versions |= {
            f"wgmma, tiles of {tile}": [partial(plain_experts.by_wgmma, one, tile) for one in calls] for tile in tiles
        }
    for name, stacks in layers.quantized.items():
        routed = [one._replace(w13=w13, w2=w2) for one, (w13, w2) in zip(calls, itertools.cycle(stacks), strict=False)]
        versions[name] = [partial(moe.expert_terms, one) for one in routed]
        many = average > 64
        if many:
            versions[f"{name}, dequantised"] = [partial(by_plain_kernels, one) for one in routed]
        for title, kernels in kernels_of(*stacks[0]).items():
            # Tiles that are too small, or mostly empty, are left out.
            fits = average / 2 <= kernels.rows <= 8 * average if "wgmma" in title else not many or kernels.rows == 64
            if fits:
                versions[f"{name}, {title}"] = [partial(quantized_experts.experts, one, kernels) for one in routed]
    _, k, hidden, inner, _ = layers.shape
    table.add(f"experts {rows}x{hidden}x{inner} top {k}", bytes_, versions, flops)


def configs() -> Iterator[TileConfig]:
    for rows, outputs, inputs, warps, stages in itertools.product(
        (16, 32, 64, 128), (32, 64, 128, 256), (64, 128), (4, 8), (2, 3, 4)
    ):
        local_experts = (rows + outputs) * inputs * 2 * stages
        if local_experts <= 200 << 10 and rows * outputs <= 128 * 256 and (warps == 4 or rows * outputs >= 64 * 128):
            yield TileConfig(rows, outputs, inputs, warps, stages)


def tune(layers: Layers, rows: int) -> None:
    """Each GEMM apart: rows are those of both."""
    from phalanx.kernels.moe import moe_triton

    calls = layers.calls(rows)
    bytes_, flops = layers.limits(calls)
    limit = max(bytes_ / BANDWIDTH, flops / FLOPS) * 1e6
    silu = ACTIVATIONS.index("silu")
    average = rows * layers.shape.top_k / layers.shape.experts
    for height in (16, 32, 64, 128):
        if height > max(16, 8 * average) or height * 16 < average:
            continue
        groups = [group(one.ids, layers.shape.experts, height) for one in calls]
        hs = [torch.randn(one.routed, one.w2.shape[2], device="cuda").bfloat16() for one in calls]
        ys = [one.x.new_empty(one.routed, one.x.shape[1]) for one in calls]
        ups: list[tuple[float, tuple[int, ...]]] = []
        downs: list[tuple[float, tuple[int, ...]]] = []
        for config in (one for one in configs() if one.rows == height):
            both = config._replace(outputs=config.outputs // 2)
            up: list[Call] = [
                partial(moe_triton.expert_up, *one[:3], moe.plain(one.w13, one.x.dtype), g, silu, both, None, h)
                for one, g, h in zip(calls, groups, hs, strict=True)
            ]
            down: list[Call] = [
                partial(moe_triton.expert_down, h, moe.plain(one.w2, h.dtype), g, config, one.weights, None, y)
                for h, g, one, y in zip(hs, groups, calls, ys, strict=True)
            ]
            for found, one, kernel in ((ups, up, both), (downs, down, config)):
                try:
                    found.append((round(measure(one, 12, 5), 1), tuple(kernel)))
                except Exception as error:  # too much shared memory, or too many registers
                    print(f"{tuple(kernel)}: {error!r}"[:100], flush=True)
        print(f"{rows} rows, limit {limit:.1f}, tiles of {height}: up {sorted(ups)[:4]} down {sorted(downs)[:4]}",
              flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--formats", nargs="*", default=(), help="of quantised experts beside")
    parser.add_argument("--tune", action="store_true", help="try tiles")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    torch.manual_seed(0)
    table = Table("")
    with torch.no_grad():
        layers = Layers(SHAPES[asked.shapes], asked.formats)
        compile_quantized(layers)
        for rows in asked.rows:
            if asked.tune:
                tune(layers, rows)
            else:
                router(table, layers, rows)
                experts(table, layers, rows)
    table.append(asked.json)


if __name__ == "__main__":
    main()
