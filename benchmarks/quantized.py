"""Linears of quantised weights beside those of 16 bits, and beside the least time that their bytes take.

    python benchmarks/quantized.py [--format int4] [--shapes 70b-tp4] [--rows 1 16 256] [--ways] [--json FILE]
    python benchmarks/quantized.py --fit FILE

Timed as benchmarks/ops.py does; the gate and up matrices with their activation. Below each number of rows stands what
all linears of a model of 32 such layers take. fp8 has scales as --isq fp8, mostly for each 512 inputs, and
fp8-128 stands beside it, with those of blocks. --ways: also every other kernel and tile, compiled beforehand. --fit:
writes the costs of GEMMs of many rows to the sources of the kernels that `--ways --json FILE` has timed: FP8's, and
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
    dequantize_pieces,
    e4m3,
    e4m3_rows,
    e4m3_wgmma,
    e4m3_wide,
    floats,
    grouped_gemv,
    int4_cuda,
    pieces_cuda,
    q4_k,
    q5_k,
    q6_k,
    q8_0_cuda,
    quantized_gemm,
    quantized_gemv,
    quantized_wgmma,
    super_blocks,
    super_blocks_cuda,
)
from phalanx.kernels.quantized.pieces_cuda import Layout, Packed
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BESIDE = {"fp8": "fp8-128"}  # formats that are timed with others
NAMES = ("qkv", "o", "gate_up", "down", "head")
LAYERS = 32
GEMVS = (quantized_gemv.GemvConfig(1, 8, 2), quantized_gemv.GemvConfig(1, 4, 3), quantized_gemv.GemvConfig(2, 4, 2))


def random_q8_0(outputs: int, inputs: int) -> Packed:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device="cuda")
    return q8_0_cuda.pack(codes, (torch.rand(outputs, inputs // 32, device="cuda") / 4096).half())


def random_int4(outputs: int, inputs: int, zeros: bool = False) -> Packed:
    """In groups of 128, with zero points or without."""
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(outputs, inputs // 128, device="cuda") / 256).half()
    at = torch.randint(0, 16, scales.shape, device="cuda") if zeros else torch.full(scales.shape, 8, device="cuda")
    return int4_cuda.pack(codes, scales, at.to(torch.int16))


def random_super_blocks(outputs: int, inputs: int, form: super_blocks.Form) -> Packed:
    codes = torch.randint(0, 2**form.bits, (outputs, inputs), dtype=torch.uint8, device="cuda")
    factors = (torch.rand(outputs, inputs // form.super, 2, device="cuda") / 9999).half()
    scales, minima = torch.randint(0, 64, (2, outputs, inputs // form.group), dtype=torch.int8, device="cuda")
    pieces = super_blocks_cuda.pack(codes, factors, scales, minima, form)
    return Packed(pieces, outputs, super_blocks_cuda.layout(form))


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
    "q4_k": partial(random_super_blocks, form=q4_k.FORM),
    "q5_k": partial(random_super_blocks, form=q5_k.FORM),
    "q6_k": partial(random_super_blocks, form=q6_k.FORM),
}


def gemvs(layout: Layout) -> list[quantized_gemv.GemvConfig]:
    return [config._replace(ahead=config.ahead // (1 + (layout.bytes > quantized_gemv.LARGE))) for config in GEMVS]


def by_pieces(x: Tensor, packed: Packed, gate: str) -> Tensor:
    if packed.layout.header == e4m3_wide.LAYOUT.header:
        return floats.linear(x, packed, gate)
    if pieces_cuda.supports(x, packed):
        return pieces_cuda.linear(x, packed, gate)
    return by_bf16(x, dequantize_pieces.dequantize(packed, x.dtype), gate)


def by_bf16(x: Tensor, weight: Tensor, gate: str) -> Tensor:
    return gated_linear(x, weight, gate) if gate else linear(x, weight)


def kernels_of(x: Tensor, packed: Packed, gate: str) -> dict[str, Any]:
    """Every kernel and config that computes it: a function of x, packed and gate."""
    rows, found = len(x), dict[str, Any]()
    eights = _e4m3_configs(rows, packed.inputs, packed.layout, gate)
    for eight in eights:
        found["e{}n{}s{}x{}w{}m{}".format(*eight)] = partial(_e4m3, eight)
    if eights:
        return found
    if rows <= quantized_gemv.MOST_ROWS:
        for strip in gemvs(packed.layout):
            fits = quantized_gemv.shared(rows, packed.inputs, strip.strips) <= quantized_gemv.SHARED
            if fits and (not gate or strip.strips == 2):
                found["gemv{}a{}b{}".format(*strip)] = partial(_gemv, strip)
    for one in grouped_gemv.configs(rows, packed.inputs, packed.layout, bool(gate)):
        found["grouped{}r{}".format(*one)] = partial(_grouped, one)
    if rows <= quantized_gemm.MOST_ROWS:
        for config in quantized_gemm.configs(rows, packed.outputs, packed.inputs, packed.layout, bool(gate)):
            found["m{}k{}t{:d}".format(*config)] = partial(_gemm, config)
    for many in _wgmma_configs(rows, packed.inputs, packed.layout, gate):
        found["m{}n{}k{}s{}x{}".format(*many)] = partial(_wgmma, many)
    for both in _wgmma_parts(rows, packed.outputs, packed.inputs, packed.layout, gate):
        first, rest = ("m{}n{}k{}".format(*config[:3]) for config in (both.first, both.rest))
        found[f"{first}+{rest}@{both.columns}"] = partial(_parts, both)
    return found


def _gemv(config: quantized_gemv.GemvConfig, x: Tensor, packed: Packed, gate: str) -> Tensor:
    return quantized_gemv.gemv(x, packed, config, gate)


def _grouped(config: grouped_gemv.GroupedConfig, x: Tensor, packed: Packed, gate: str) -> Tensor:
    return grouped_gemv.gemv(x, packed, config, gate)


def _gemm(config: quantized_gemm.TileConfig, x: Tensor, packed: Packed, gate: str) -> Tensor:
    return quantized_gemm.gemm(x, packed, config, gate)


def _wgmma(config: quantized_wgmma.WgmmaConfig, x: Tensor, packed: Packed, gate: str) -> Tensor:
    return quantized_wgmma.gemm(x, packed, config, gate)


def _parts(config: quantized_wgmma.WgmmaParts, x: Tensor, packed: Packed, gate: str) -> Tensor:
    return quantized_wgmma.gemm_in_parts(x, packed, config, gate)


def _e4m3(config: e4m3_wgmma.E4m3Config, x: Tensor, packed: Packed, gate: str) -> Tensor:
    return e4m3_wgmma.gemm(e4m3_rows.encode(x), packed, config, gate)


def _e4m3_configs(rows: int, inputs: int, layout: Layout, gate: str) -> list[e4m3_wgmma.E4m3Config]:
    wide, hopper = layout.header == e4m3_wide.LAYOUT.header, device_caps(torch.device("cuda")).hopper
    taken = wide and hopper and rows >= e4m3_wgmma.LEAST_ROWS
    return list(e4m3_wgmma.configs(rows, inputs, layout.alike, bool(gate))) if taken else []


def _wgmma_configs(rows: int, inputs: int, layout: Layout, gate: str) -> list[quantized_wgmma.WgmmaConfig]:
    taken = device_caps(torch.device("cuda")).hopper and rows in quantized_wgmma.ROWS
    return list(quantized_wgmma.configs(rows, inputs, layout, bool(gate))) if taken else []


def _wgmma_parts(rows: int, outputs: int, inputs: int, layout: Layout, gate: str) -> list[quantized_wgmma.WgmmaParts]:
    """Of any rows, whether `choose` takes two parts or not; their configs are among those that stand alone."""
    caps = device_caps(torch.device("cuda"))
    taken = caps.hopper and rows in quantized_wgmma.ROWS
    return list(quantized_wgmma.parts(rows, outputs, inputs, layout, bool(gate), caps.num_sms)) if taken else []


def compile_all(shapes: list[tuple[int, int, str]], rows: list[int], form: str) -> None:
    device, wanted = torch.device("cuda"), list[jit.KernelVariant]()
    for outputs, inputs, gate in shapes:
        layout = FORMATS[form](16, inputs).layout
        for n in rows:
            eights = _e4m3_configs(n, inputs, layout, gate)
            for eight in eights:
                sizes = e4m3_wgmma.sizes(inputs, eight, gate, False, layout.alike)
                wanted.append(jit.variant("e4m3_wgmma", BF16, **sizes))
            if eights:
                continue
            if n <= quantized_gemv.MOST_ROWS:
                for strip in gemvs(layout):
                    sizes = quantized_gemv.sizes(n, inputs, strip, gate, False, layout)
                    wanted.append(jit.variant("quantized_gemv", BF16, **sizes))
            for one in grouped_gemv.configs(n, inputs, layout, bool(gate)):
                sizes = grouped_gemv.sizes(n, inputs, one, gate, False, layout)
                wanted.append(jit.variant("grouped_gemv", BF16, **sizes))
            if n <= quantized_gemm.MOST_ROWS:
                for config in quantized_gemm.configs(n, outputs, inputs, layout, bool(gate)):
                    sizes = quantized_gemm.sizes(n, inputs, config, gate, False, layout)
                    wanted.append(jit.variant("quantized_gemm", BF16, **sizes))
            for many in _wgmma_configs(n, inputs, layout, gate):
                sizes = quantized_wgmma.sizes(inputs, many, gate, False, layout)
                wanted.append(jit.variant("quantized_wgmma", BF16, **sizes))
    jit.compile_ahead(wanted, device)
    for thread in threading.enumerate():
        if thread.name == "compile":
            thread.join()


def bench(
    form: str, name: str, outputs: int, inputs: int, gate: str, rows: list[int], all_ways: bool
) -> list[dict[str, Any]]:
    weights = [randn(outputs, inputs) for _ in range(copies(outputs * inputs * 2))]
    pieces = [FORMATS[form](outputs, inputs)]
    size = pieces[0].pieces.nbytes
    pieces += [FORMATS[form](outputs, inputs) for _ in range(copies(size) - 1)]
    others = [FORMATS[BESIDE[form]](outputs, inputs) for _ in pieces] if form in BESIDE else []
    lines = []
    for n in rows:
        x = randn(n, inputs)
        bytes_ = size + 2 * n * (inputs + outputs / (2 if gate else 1))
        limit = max(bytes_ / BANDWIDTH, 2 * n * outputs * inputs / FLOPS) * 1e6
        versions: dict[str, list[Call]] = {
            "bf16": [partial(by_bf16, x, w, gate) for w in weights],
            form: [partial(by_pieces, x, p, gate) for p in pieces],
        }
        if others:
            versions[BESIDE[form]] = [partial(by_pieces, x, p, gate) for p in others]
        if all_ways:
            versions |= {k: [partial(f, x, p, gate) for p in pieces] for k, f in kernels_of(x, pieces[0], gate).items()}
        times = {key: round(measure(calls), 2) for key, calls in versions.items()}
        rate, share = bytes_ / times[form] / 1e6, limit / times[form]
        about = dict(what=form, op=name, rows=n, outputs=outputs, inputs=inputs, alike=pieces[0].layout.alike)
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
