"""Experts in host memory on the CPU: one layer's, by format and by the rows that each expert has.

    python benchmarks/host_experts.py [--formats q4_k int4] [--rows 1 4 16 64] [--threads 1 2] [--isa avx512_bf16]

Each call computes CHOSEN experts, which the calls before have not read, so that weights come from memory. Beside the
microseconds of a row of an expert stand the GB/s at which its weights are read, and GFLOP/s. --isa: no better
instruction set than this one, of kernels/cpp/compiler.py's; two runs compare them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from phalanx.kernels.cpp import compiler, ops
from phalanx.kernels.moe.host_experts import Experts, HostRouted
from phalanx.kernels.moe.moe import Matrices
from phalanx.kernels.quantized import affine, e4m3, gpu_layout, mxfp4
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.stack import Stack, stack
from phalanx.kernels.quantized.super_blocks import q4_k, q6_k

CHOSEN = 8
EXPERTS = 64
HIDDEN, INNER = 2048, 768
ROUNDS = 5


def codec(of: object, encode: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> Callable[..., Matrices]:
    """One expert's weights, again and again."""

    def make(outputs: int, inputs: int) -> Stack:
        parts = encode(torch.randn(outputs, inputs) * inputs**-0.5)
        return stack(of, lambda _: parts, (EXPERTS, outputs, inputs))  # type: ignore[arg-type]

    return make


def grouped(zeros: bool) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    def encode(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups = weight.view(len(weight), -1, 128)
        scales = (groups.abs().amax(2) / 8).half().float()
        at = torch.randint(0, 16, scales.shape).short() if zeros else torch.full(scales.shape, 8).short()
        codes = (groups / scales.unsqueeze(2) + at.unsqueeze(2)).round().clamp(0, 15)
        return codes.view(weight.shape).to(torch.uint8), scales, at

    return encode


def plain(dtype: torch.dtype) -> Callable[..., Matrices]:
    return lambda *shape: (torch.randn(EXPERTS, *shape) * shape[1] ** -0.5).to(dtype)


def e2m1(outputs: int, inputs: int) -> Matrices:
    codes = torch.randint(0, 256, (EXPERTS, outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.randint(110, 120, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8)
    return mxfp4.experts(codes, scales, inputs, torch.float32)


FORMATS: dict[str, Callable[..., Matrices]] = {
    "bf16": plain(torch.bfloat16),
    "f16": plain(torch.float16),
    "q8_0": codec(q8_0, q8_0.encode),
    "q6_k": codec(q6_k, lambda weight: (q6_k.encode(weight)[0],)),
    "q4_k": codec(q4_k, lambda weight: (q4_k.encode(weight)[0],)),
    "int4": codec(affine, grouped(False)),
    "int4-zeros": codec(affine, grouped(True)),
    "fp8": codec(e4m3, e4m3.encode),
    "mxfp4": e2m1,
}


def seconds(layer: Experts, rows: int, dtype: torch.dtype) -> float:
    """The fastest call's seconds; for one thread its CPU time, so that other work on the machine is not counted."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    x, best = torch.randn(rows, HIDDEN).to(dtype), float("inf")
    ids, at = torch.zeros(rows, CHOSEN, dtype=torch.int32), torch.full((EXPERTS,), -1)
    calls = HostRouted(x, ids, torch.ones(ids.shape), "silu").all_calls(layer, at, torch.empty(rows, HIDDEN)).calls
    packed = ops.call_array([(one.address, ops.pack(values)) for one, values in calls])  # as decode steps keep them
    ops.stay_awake(1e-3)
    for i in range(ROUNDS + 1):
        chosen = (torch.arange(CHOSEN) + i * CHOSEN) % EXPERTS
        ids[:], at[:] = chosen.int(), -1
        at[chosen] = chosen
        started = clock()
        ops.run_calls(packed, len(calls), torch.get_num_threads())
        if i:
            best = min(best, clock() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--isa", choices=compiler.ISAS)
    args = parser.parse_args()
    for better in list(compiler.ISAS)[: list(compiler.ISAS).index(args.isa)] if args.isa else ():
        del compiler.ISAS[better]
    print(f"{compiler.isas()[0]}; microseconds of a row of an expert (GB/s, GFLOP/s)")
    print(f"{'format':12}{'threads':>8}" + "".join(f"{rows:>26}" for rows in args.rows) + "   rows of each expert")
    for name in args.formats:
        torch.manual_seed(0)
        layer = Experts(FORMATS[name](2 * INNER, HIDDEN), FORMATS[name](HIDDEN, INNER))
        size = sum(x[0].nbytes for one in layer for x in gpu_layout.parts(one).tensors)
        for threads in args.threads:
            torch.set_num_threads(threads)
            cells = []
            for rows in args.rows:
                each = seconds(layer, rows, torch.float16 if name == "f16" else torch.bfloat16) / CHOSEN
                flops = 2 * rows * sum(math.prod(one.shape[1:]) for one in layer) / each
                cells.append(f"{1e6 * each / rows:10.1f} ({size / each / 1e9:5.1f}, {flops / 1e9:6.0f})")
            print(f"{name:12}{threads:>8}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
