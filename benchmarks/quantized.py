"""Linears of 8-bit weights beside those of 16 bits, and beside the least time that their bytes take.

    python benchmarks/quantized.py [--shapes 70b-tp4] [--rows 1 16 256] [--ways] [--json FILE]

Timed as benchmarks/ops.py does; the gate and up matrices with their activation. Below each number of rows stands what
all linears of a model of 32 such layers take. --ways: also every other way to cut a product, compiled beforehand.
"""

from __future__ import annotations

import argparse
import json
import threading
from functools import partial
from typing import Any

import torch
from phalanx.benchmarks.ops import BANDWIDTH, BF16, FLOPS, SHAPES, copies, randn
from phalanx.benchmarks.timing import Call, measure
from phalanx.kernels import jit
from phalanx.kernels.device import device_caps
from phalanx.kernels.gemm.linear import gated_linear, linear
from phalanx.kernels.quantized import q8_0_cuda as q8_0
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NAMES = ("qkv", "o", "gate_up", "down", "head")
LAYERS = 32
GEMVS = (q8_0.GemvConfig(1, 8, 2), q8_0.GemvConfig(1, 4, 3), q8_0.GemvConfig(2, 4, 2))


def random_pieces(outputs: int, inputs: int) -> q8_0.Packed:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
    return q8_0.pack(codes, (torch.rand(outputs, inputs // 32, device="cuda") / 4096).half())


def by_q8_0(x: Tensor, packed: q8_0.Packed, gate: str) -> Tensor:
    if q8_0.supports(x, packed):
        return q8_0.linear(x, packed, gate)
    return by_bf16(x, q8_0.dequantize(packed, x.dtype), gate)


def by_bf16(x: Tensor, weight: Tensor, gate: str) -> Tensor:
    return gated_linear(x, weight, gate) if gate else linear(x, weight)


def ways(x: Tensor, packed: q8_0.Packed, gate: str) -> dict[str, Any]:
    """Every way to compute it: a function of x, packed and gate."""
    rows, found = len(x), dict[str, Any]()
    if rows <= q8_0.MOST_GEMV_ROWS:
        for way in GEMVS:
            fits = q8_0.gemv_shared(rows, packed.inputs, way.strips) <= q8_0.GEMV_SHARED
            if fits and (not gate or way.strips == 2):
                found["gemv{}a{}b{}".format(*way)] = partial(_gemv, way)
    if rows <= q8_0.MOST_ROWS:
        for cut in q8_0.tile_configs(rows, packed.outputs, packed.inputs, bool(gate)):
            found["m{}k{}".format(*cut)] = partial(_gemm, cut)
    for many in _wgmma_cuts(rows, packed.inputs, gate):
        found["m{}n{}k{}s{}x{}".format(*many)] = partial(_wgmma, many)
    return found


def _gemv(way: q8_0.GemvConfig, x: Tensor, packed: q8_0.Packed, gate: str) -> Tensor:
    return q8_0.gemv(x, packed, way, gate)


def _gemm(cut: q8_0.TileConfig, x: Tensor, packed: q8_0.Packed, gate: str) -> Tensor:
    return q8_0.gemm(x, packed, cut, gate)


def _wgmma(cut: q8_0.WgmmaConfig, x: Tensor, packed: q8_0.Packed, gate: str) -> Tensor:
    return q8_0.wgmma(x, packed, cut, gate)


def _wgmma_cuts(rows: int, inputs: int, gate: str) -> list[q8_0.WgmmaConfig]:
    taken = device_caps(torch.device("cuda")).hopper and rows in q8_0.WGMMA_ROWS
    return list(q8_0.wgmma_configs(rows, inputs, bool(gate))) if taken else []


def compile_all(shapes: list[tuple[int, int, str]], rows: list[int]) -> None:
    device, wanted = torch.device("cuda"), list[jit.KernelVariant]()
    for outputs, inputs, gate in shapes:
        for n in rows:
            if n <= q8_0.MOST_GEMV_ROWS:
                for way in GEMVS:
                    wanted.append(jit.variant("quantized_gemv", BF16, **q8_0._gemv_sizes(n, inputs, way, gate, False)))
            if n <= q8_0.MOST_ROWS:
                for cut in q8_0.tile_configs(n, outputs, inputs, bool(gate)):
                    wanted.append(jit.variant("quantized_gemm", BF16, **q8_0._gemm_sizes(n, inputs, cut, gate, False)))
            for many in _wgmma_cuts(n, inputs, gate):
                wanted.append(jit.variant("quantized_wgmma", BF16, **q8_0._wgmma_sizes(inputs, many, gate, False)))
    jit.compile_ahead(wanted, device)
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()


def bench(name: str, outputs: int, inputs: int, gate: str, rows: list[int], all_ways: bool) -> list[dict[str, Any]]:
    weights = [randn(outputs, inputs) for _ in range(copies(outputs * inputs * 2))]
    pieces = [random_pieces(outputs, inputs) for _ in range(copies(outputs * inputs * 17 / 16))]
    lines = []
    for n in rows:
        x = randn(n, inputs)
        bytes_ = outputs * inputs * 17 / 16 + 2 * n * (inputs + outputs / (2 if gate else 1))
        limit = max(bytes_ / BANDWIDTH, 2 * n * outputs * inputs / FLOPS) * 1e6
        versions: dict[str, list[Call]] = {
            "bf16": [partial(by_bf16, x, w, gate) for w in weights],
            "q8_0": [partial(by_q8_0, x, p, gate) for p in pieces],
        }
        if all_ways:
            versions |= {k: [partial(f, x, p, gate) for p in pieces] for k, f in ways(x, pieces[0], gate).items()}
        times = {key: round(measure(calls), 2) for key, calls in versions.items()}
        rate, share = bytes_ / times["q8_0"] / 1e6, limit / times["q8_0"]
        lines.append(dict(what="q8_0", op=name, rows=n, outputs=outputs, inputs=inputs, limit_us=limit, **times))
        rest = "   ".join(f"{k} {v}" for k, v in times.items() if k not in ("bf16", "q8_0"))
        print(f"{n:4} x {name:8} bf16 {times['bf16']:8.2f}  q8_0 {times['q8_0']:8.2f} us  {rate:5.2f} TB/s  "
              f"{share:4.0%} of the limit   {rest}", flush=True)  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", choices=NAMES, nargs="+", default=NAMES)
    parser.add_argument("--ways", action="store_true", help="every way to cut a product")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), device_caps(torch.device("cuda")))
    shapes = [
        (*shape, "silu" if name == "gate_up" else "") for name, shape in zip(NAMES, SHAPES[asked.shapes], strict=True)
    ]
    if asked.ways:
        compile_all([shape for name, shape in zip(NAMES, shapes, strict=True) if name in asked.only], asked.rows)
    lines = []
    with torch.no_grad():
        for name, (outputs, inputs, gate) in zip(NAMES, shapes, strict=True):
            if name in asked.only:
                lines += bench(name, outputs, inputs, gate, asked.rows, asked.ways)
    for n in asked.rows:
        here = [(line, 1 if line["op"] == "head" else LAYERS) for line in lines if line["rows"] == n]
        sums = {key: sum(line[key] * count for line, count in here) / 1e3 for key in ("limit_us", "bf16", "q8_0")}
        print(
            f"{n:4} rows, linears, ms: limit {sums['limit_us']:.2f}, bf16 {sums['bf16']:.2f}, q8_0 {sums['q8_0']:.2f}"
        )
    if asked.json:
        about = dict(engine="phalanx", device=torch.cuda.get_device_name(), torch=torch.__version__)
        with open(asked.json, "a") as file:
            file.writelines(json.dumps(about | line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
