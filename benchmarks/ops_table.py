"""Parts that benchmarks of operations share: shapes, inputs, and the table of times next to the limits of a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from phalanx.benchmarks.timing import Call, energy, measure
from torch import Tensor

BANDWIDTH = 4.52e12  # bytes/s, read-only stream on H200
FLOPS = 790e12  # bf16, measured on H200
CACHE = 120e6  # bytes that a rotation must exceed
BF16 = torch.bfloat16

# Outputs and inputs of qkv, o, gate_up, down and the head, of one rank.
SHAPES = {
    "8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "qwen2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)),
    "gemma2-9b": ((8192, 3584), (3584, 4096), (28672, 3584), (3584, 14336), (256000, 3584)),
    "8b-tp2": ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168), (64128, 4096)),
    "70b-tp4": ((2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168), (32064, 8192)),
}


class Table:
    def __init__(self, only: str, joules: bool = False):
        self.only, self.joules, self.lines = only, joules, list[dict[str, Any]]()

    def add(self, op: str, bytes_: float, versions: dict[str, list[Call]], flops: float = 0.0, least: int = 16) -> None:
        """versions: name → the same call on each copy of the inputs."""
        if self.only and self.only not in op:
            return
        limit = max(bytes_ / BANDWIDTH, flops / FLOPS) * 1e6
        times: dict[str, float | str] = {}
        for name, calls in versions.items():
            try:
                times[name] = round(measure(calls, least), 2)
                if self.joules:
                    times[f"{name}, mJ"] = round(energy(calls, least) * 1e3, 3)
            except Exception as error:  # one version that fails must not cost the others' numbers
                times[name] = repr(error)[:60]
        self.lines.append(dict(what="op", op=op, limit_us=round(limit, 2), **times))
        print(f"{op:34} limit {limit:8.1f}   " + "   ".join(f"{k} {v}" for k, v in times.items()), flush=True)

    def append(self, path: str | None, **about: Any) -> None:
        """Append raw lines to a file, if one is given, each with what they are about."""
        if path:
            about |= dict(engine="phalanx", device=torch.cuda.get_device_name(), torch=torch.__version__)
            with open(path, "a") as file:
                file.writelines(json.dumps(about | line) + "\n" for line in self.lines)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def copies(bytes_: float) -> int:
    return max(1, min(24, int(CACHE * 2 / bytes_)))


def make_rows(query_lens: list[int], kv_lens: list[int]) -> tuple[Any, int]:
    """A batch whose sequences lie in shuffled blocks, and how many blocks there are."""
    need = [-(-n // 16) for n in kv_lens]
    order = torch.randperm(sum(need), device="cuda", dtype=torch.int32)
    tables = torch.zeros(len(need), max(need), dtype=torch.int32, device="cuda")
    for i, part in enumerate(order.split(need)):
        tables[i, : len(part)] = part
    rows = SimpleNamespace(
        block_tables=tables,
        lengths=torch.tensor(kv_lens, dtype=torch.int32, device="cuda"),
        query_starts=torch.tensor([0, *query_lens]).cumsum(0).to("cuda", torch.int32),
        num_decodes=sum(n == 1 for n in query_lens),
        query_len=1,
        query_lens=query_lens,
        kv_lens=kv_lens,
        scratch={},
    )
    return rows, sum(need)
