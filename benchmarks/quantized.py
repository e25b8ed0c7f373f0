"""Linears of quantised weights next to those of 16 bits and to the least time that their bytes take.

    python benchmarks/quantized.py [--format int4] [--shapes 70b-tp4] [--rows 1 16 256] [--ways] [--json FILE]
    python benchmarks/quantized.py --fit FILE

Timed as benchmarks/ops.py does; the gate and up matrices with their activation. Below each number of rows stands what
all linears of a model of 32 such layers take. fp8 has scales as --isq fp8, mostly for each 512 inputs, and
fp8-128 is added, with those of blocks. --ways: also every other kernel and tile, compiled beforehand. --fit:
writes the costs of GEMMs of large M to the sources of the kernels that `--ways --json FILE` has timed: FP8's, and
those that make weights in registers.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from phalanx.benchmarks import configs_fit
from phalanx.benchmarks.ops_table import BANDWIDTH, BF16, FLOPS, SHAPES, copies, randn
from phalanx.benchmarks.timing import Call, measure
from phalanx.kernels import jit
from phalanx.kernels.device import device_caps
from phalanx.kernels.gemm.linear import gated_linear, linear
from phalanx.kernels.quantized import (
    cuda_layouts,
    e4m3,
    e4m3_rows,
    e4m3_wgmma,
    floats,
    packed_gemm,
    quantized_gemm,
    quantized_wgmma,
)
from phalanx.kernels.quantized import linear as packed_linear
from phalanx.kernels.quantized.codec import SuperBlock
from phalanx.kernels.quantized.e4m3_wgmma import E4m3Config
from phalanx.kernels.quantized.ggml_types import Decoded
from phalanx.kernels.quantized.packed_gemm import KernelConfig, Layout, Packed
from phalanx.kernels.quantized.quantized_gemm import GemvConfig, GroupedConfig, TileConfig
from phalanx.kernels.quantized.super_blocks import q4_k, q5_k, q6_k
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BESIDE = {"fp8": "fp8-128"}  # formats that are timed with others
NAMES = ("qkv", "o", "gate_up", "down", "head")
LAYERS = 32
GEMVS = GemvConfig(1, 8, 2), GemvConfig(1, 4, 3), GemvConfig(2, 4, 2)
KEYS = {
    E4m3Config: "e{}n{}s{}x{}w{}m{}",
    GemvConfig: "gemv{}a{}b{}",
    GroupedConfig: "grouped{}r{}",
    TileConfig: "m{}k{}t{:d}",
    quantized_wgmma.WgmmaConfig: "m{}n{}k{}s{}",
}


def random_q8_0(outputs: int, inputs: int) -> Packed:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
    scales = (torch.rand(outputs, inputs // 32, device="cuda") / 4096).half()
    return cuda_layouts.pack(cuda_layouts.Q8_0, codes, scales=scales)


def random_int4(outputs: int, inputs: int, zeros: bool = False) -> Packed:
    """In groups of 128, with zero points or without."""
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(outputs, inputs // 128, device="cuda") / 256).half()
    at = torch.randint(0, 16, scales.shape, device="cuda") if zeros else torch.full(scales.shape, 8, device="cuda")
    return cuda_layouts.pack_int4(codes, scales, at.to(torch.int16))


def random_super_blocks(outputs: int, inputs: int, form: SuperBlock) -> Packed:
    codes = torch.randint(0, 2**form.bits, (outputs, inputs), dtype=torch.uint8, device="cuda")
    factors = (torch.rand(outputs, inputs // form.super, 2, device="cuda") / 9999).half()
    scales, minima = torch.randint(0, 64, (2, outputs, inputs // form.group), dtype=torch.int8, device="cuda")
    return cuda_layouts.pack_super_blocks(Decoded(codes, factors, scales, minima), form)


def random_fp8(outputs: int, inputs: int, unit: int = 0) -> Packed:
    """With a scale for each `unit` inputs of an output, or as --isq fp8. Of normal weights, as power, which bounds many
    rows, depends on what is multiplied."""
    encoded = e4m3.encode_reference(randn(outputs, inputs), unit or e4m3.unit_of(inputs))
    packed = floats.pack_for_device(floats.pack(*encoded))
    assert isinstance(packed, Packed)
    return packed


FORMATS: dict[str, Callable[[int, int], Packed]] = {
    "q8_0": random_q8_0,
    "int4": random_int4,
    "int4-zeros": partial(random_int4, zeros=True),
    "fp8": random_fp8,
    "fp8-128": partial(random_fp8, unit=128),
    "q4_k": partial(random_super_blocks, form=q4_k.type.form),
    "q5_k": partial(random_super_blocks, form=q5_k.type.form),
    "q6_k": partial(random_super_blocks, form=q6_k.type.form),
}


def by_pieces(x: Tensor, packed: Packed, gate: str) -> Tensor:
    if packed.layout.header == cuda_layouts.E4M3_WIDE.header:
        return packed_linear.linear(x, packed, gate)
    if packed_gemm.supports(x, packed):
        return packed_gemm.linear(x, packed, gate)
    return by_bf16(x, packed_gemm.dequantize(packed, x.dtype), gate)


def by_bf16(x: Tensor, weight: Tensor, gate: str) -> Tensor:
    return gated_linear(x, weight, gate) if gate else linear(x, weight)


def configs(rows: int, outputs: int, inputs: int, layout: Layout, gate: str) -> list[KernelConfig]:
    """All that take these sizes."""
    of, hopper = (layout, bool(gate)), device_caps(torch.device("cuda")).hopper
    if e4m3_wgmma.chosen(rows, layout, device_caps(torch.device("cuda"))):
        return list(e4m3_wgmma.configs(rows, inputs, layout.alike, bool(gate)))
    found: list[KernelConfig] = []
    for n_tile in GEMVS:
        one = n_tile._replace(ahead=n_tile.ahead // (1 + (layout.bytes > quantized_gemm.LARGE)))
        fits = rows <= quantized_gemm.GEMV_ROWS and one.shared(rows, inputs, layout) <= quantized_gemm.GEMV_SHARED
        found += [one] if fits and (not gate or one.n_tiles == 2) else []
    found += quantized_gemm.grouped_configs(inputs, *of) if rows == 1 else ()
    found += quantized_gemm.configs(rows, outputs, inputs, *of) if rows <= quantized_gemm.MAX_ROWS else ()
    found += quantized_wgmma.configs(rows, inputs, *of) if hopper and rows in quantized_wgmma.ROWS else ()
    return found


def kernels_of(x: Tensor, packed: Packed, gate: str) -> dict[str, Any]:
    """Every kernel and config that computes it: a function of x, packed and gate."""
    every = configs(len(x), packed.outputs, packed.inputs, packed.layout, gate)
    return {KEYS[type(one)].format(*one): partial(_gemm, one) for one in every}


def _gemm(config: KernelConfig, x: Tensor, packed: Packed, gate: str) -> Tensor:
    return packed_gemm.gemm(e4m3_rows.encode(x) if isinstance(config, E4m3Config) else x, packed, config, gate)


def compile_all(shapes: list[tuple[int, int, str]], rows: list[int], form: str) -> None:
    device, wanted = torch.device("cuda"), list[jit.KernelVariant]()
    for outputs, inputs, gate in shapes:
        layout = FORMATS[form](16, inputs).layout
        for n in rows:
            for one in configs(n, outputs, inputs, layout, gate):
                sizes = packed_gemm.sizes(n, inputs, one, gate, False, layout)
                wanted.append(jit.variant(packed_gemm.SOURCES[type(one)], BF16, **sizes))
    jit.compile_ahead(wanted, device)
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()


def bench(
    form: str, name: str, outputs: int, inputs: int, gate: str, rows: list[int], all_ways: bool
) -> list[dict[str, Any]]:
    weights = [randn(outputs, inputs) for _ in range(copies(outputs * inputs * 2))]
    packed_tiles = [FORMATS[form](outputs, inputs)]
    size = packed_tiles[0].tiles.nbytes
    packed_tiles += [FORMATS[form](outputs, inputs) for _ in range(copies(size) - 1)]
    others = [FORMATS[BESIDE[form]](outputs, inputs) for _ in packed_tiles] if form in BESIDE else []
    lines = []
    for n in rows:
        x = randn(n, inputs)
        bytes_ = size + 2 * n * (inputs + outputs / (2 if gate else 1))
        limit = max(bytes_ / BANDWIDTH, 2 * n * outputs * inputs / FLOPS) * 1e6
        versions: dict[str, list[Call]] = {
            "bf16": [partial(by_bf16, x, w, gate) for w in weights],
            form: [partial(by_pieces, x, p, gate) for p in packed_tiles],
        }
        if others:
            versions[BESIDE[form]] = [partial(by_pieces, x, p, gate) for p in others]
        if all_ways:
            versions |= {
                k: [partial(f, x, p, gate) for p in packed_tiles]
                for k, f in kernels_of(x, packed_tiles[0], gate).items()
            }
        times = {key: round(measure(calls), 2) for key, calls in versions.items()}
        rate, share = bytes_ / times[form] / 1e6, limit / times[form]
        about = dict(what=form, op=name, rows=n, outputs=outputs, inputs=inputs, alike=packed_tiles[0].layout.alike)
        lines.append(about | dict(limit_us=limit) | times)
        rest = "   ".join(f"{k} {v}" for k, v in times.items() if k not in ("bf16", form))
        print(f"{n:4} x {name:8} bf16 {times['bf16']:8.2f}  {form} {times[form]:8.2f} us  {rate:5.2f} TB/s  "
              f"{share:4.0%} of the limit   {rest}", flush=True)  # fmt: skip
    return lines


def keep(path: str, lines: list[dict[str, Any]]) -> None:
    about = dict(engine="phalanx", device=torch.cuda.get_device_name(), torch=torch.__version__)
    with open(path, "a") as file:
        file.writelines(json.dumps(about | line) + "\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=FORMATS, default="q8_0")
    parser.add_argument("--shapes", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", choices=NAMES, nargs="+", default=NAMES)
    parser.add_argument("--ways", action="store_true", help="every kernel and tile of a GEMM")
    parser.add_argument("--json", help="append raw lines to this file")
    parser.add_argument("--fit", metavar="FILE", help="fit the choice of configs to these lines")
    asked = parser.parse_args()
    if asked.fit:
        configs_fit.fit(asked.fit)
        return
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), device_caps(torch.device("cuda")))
    shapes = [
        (*shape, "silu" if name == "gate_up" else "") for name, shape in zip(NAMES, SHAPES[asked.shapes], strict=True)
    ]
    if asked.ways:
        wanted = [shape for name, shape in zip(NAMES, shapes, strict=True) if name in asked.only]
        compile_all(wanted, asked.rows, asked.format)
    lines = []
    with torch.no_grad():
        for name, (outputs, inputs, gate) in zip(NAMES, shapes, strict=True):
            if name in asked.only:
                found = bench(asked.format, name, outputs, inputs, gate, asked.rows, asked.ways)
                lines += found
                if asked.json:
                    keep(asked.json, found)
    for n in asked.rows:
        here = [(line, 1 if line["op"] == "head" else LAYERS) for line in lines if line["rows"] == n]
        keys = [key for key in ("limit_us", "bf16", asked.format, BESIDE.get(asked.format)) if key]
        sums = [f"{key} {sum(line[key] * count for line, count in here) / 1e3:.2f}" for key in keys]
        print(f"{n:4} rows, linears, ms: {', '.join(sums).replace('limit_us', 'limit')}")


if __name__ == "__main__":
    main()
