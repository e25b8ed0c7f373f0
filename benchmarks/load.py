"""How weights come from the file system: bytes that each rank reads, and GB/s, for direct and striped loading.

    python benchmarks/load.py --gb 1 --np 2                  a checkpoint of random weights, made and removed again
    mpirun -np 16 -hostfile H python benchmarks/load.py DIR  a model's directory, ranks on several nodes

Before each load every rank drops the files from its node's page cache, unless --warm. `asked` is what a rank wants of
the file system: read calls where loading is striped, the pages of 4 KiB under its slices where files are mapped. `disk`
is what the kernel then fetched for it (/proc/self/io): ranks of one node find in the cache what another has fetched, so
that on several nodes `asked` is what counts. GB/s is the checkpoint's size over the slowest rank's time. `--json`
appends raw lines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from phalanx.comm import broadcast, mesh, mpi
from phalanx.launcher.job import mpi_env, mpirun
from phalanx.rank import filesystems
from phalanx.rank.model.base import Model
from phalanx.rank.model.load import load
from phalanx.rank.model.weights import striped
from phalanx.rank.model.weights.safetensors import DTYPES, Checkpoint
from phalanx.rank.model.weights.slicing import Slice
from phalanx.rank.options import degrees
from phalanx.rank.safetensors_header import read_index
from safetensors.torch import save_file

PAGE = 4096
SHAPE: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "dtype": "bfloat16",
}  # fmt: skip


def make(directory: Path, gb: float) -> None:
    """A checkpoint of about `gb` * 10^9 bytes, in files of 16 layers at most."""
    hidden, inner, vocab = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    keys = hidden // 4
    matrices: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    layer = 2 * sum(math.prod(shape) for shape in matrices.values())
    layers = max(1, round((gb * 1e9 - 4 * vocab * hidden) / layer))
    (directory / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    ends = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    parts = [ends] + [
        {f"model.layers.{i}.{n}": s for i in range(first, min(layers, first + 16)) for n, s in matrices.items()}
        for first in range(0, layers, 16)
    ]
    files: dict[str, str] = {}
    for index, part in enumerate(parts):
        file = f"model-{index + 1:05}-of-{len(parts):05}.safetensors"
        save_file({f"{n}.weight": torch.randn(s).to(torch.bfloat16) for n, s in part.items()}, directory / file)
        files |= {f"{n}.weight": file for n in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def drop(files: list[Path]) -> None:
    """Out of this node's page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)  # what is not written yet would stay
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def fetched() -> int:
    """Bytes that were fetched from a file system for this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def touched(checkpoint: Checkpoint, parts: list[Slice]) -> int:
    """Bytes of the pages that slices lie on."""
    pages = 0
    for part in parts:
        _, entry = checkpoint.find(part.tensor)
        size = DTYPES[entry.dtype].itemsize
        width = (part.shape[1] if len(part.shape) > 1 else 1) * size
        (first, last), (left, right) = (*part.ranges, (0, 1))[:2]
        begins = entry.start + np.arange(first, last) * width + left * size
        low, high = begins // PAGE, (begins + (right - left) * size - 1) // PAGE
        pages += int((high - low + 1).sum() - (low[1:] <= high[:-1]).sum()) if last > first and right > left else 0
    return pages * PAGE


class Asked:
    """Counts what striped loading reads, as its Reader."""

    bytes = 0

    class Reader(striped.Reader):
        def __init__(self, path: Path, chunks: list[striped.Chunk]):
            super().__init__(path, chunks)
            Asked.bytes += sum(chunk.size for chunk in chunks)


def one_load(asked: argparse.Namespace, path: Path, world: mpi.MpiComm, way: str) -> dict[str, Any]:
    """A line of results, the same on every rank."""
    listing = read_index(path)
    files = [path / file for file in listing.headers]
    if not asked.warm:
        world.barrier()
        drop(files)
    Asked.bytes = 0
    grid = mesh.build(world, *degrees(world.size, asked.tp, asked.pp, dp=1)[:2])
    world.barrier()
    start, before = time.perf_counter(), fetched()
    model: Model = load(path, grid, dtype=asked.dtype, way=way)
    seconds, disk = time.perf_counter() - start, fetched() - before
    wanted = Asked.bytes if way == "striped" else touched(Checkpoint(path, listing, model.rename), list(model.slices()))
    mine = (seconds, wanted, disk, mpi.library())
    told = [json.loads(text) for text in broadcast.gather_bytes(world, json.dumps(mine).encode())]
    slowest = max(one[0] for one in told)
    size = sum(file.stat().st_size for file in files)
    return dict(
        what="load", way=way, np=world.size, tp=grid.tensor.size, pp=grid.stages, gb=round(size / 1e9, 3),
        files=len(files), file_system=filesystems.kind(path), cache="warm" if asked.warm else "cold",
        seconds=round(slowest, 2), gb_per_s=round(size / 1e9 / slowest, 3),
        asked_gb=[round(one[1] / 1e9, 3) for one in told], disk_gb=[round(one[2] / 1e9, 3) for one in told],
        mpi=told[0][3].split(",")[0],
    )  # fmt: skip


def rank_main(asked: argparse.Namespace, path: Path, place: mpi_env.RankPlacement) -> None:
    striped.Reader = Asked.Reader  # type: ignore[assignment, misc]
    world = mpi.join(place.size)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_size))
    names = broadcast.gather_bytes(world, mpi_env.hostname().encode())
    about = dict(hosts=len(set(names)), cores=os.cpu_count(), machine=platform.machine(), torch=torch.__version__,
                 dtype=asked.dtype, date=date.today().isoformat())  # fmt: skip
    for way in asked.ways.split(","):
        for _ in range(asked.repeat):
            line = one_load(asked, path, world, way) | about
            if world.rank == 0:
                print(table(line), flush=True)
                if asked.json:
                    with open(asked.json, "a") as file:
                        file.write(json.dumps(line) + "\n")
    mpi.leave()


def table(line: dict[str, Any]) -> str:
    head = "{way:<8} {gb} GB, {files} files on {file_system}, {cache} cache: {seconds} s, {gb_per_s} GB/s".format(
        **line
    )
    both = zip(line["asked_gb"], line["disk_gb"], strict=True)
    rows = [f"    rank {r:<4} asked {asked:8.3f} GB   disk {disk:8.3f} GB" for r, (asked, disk) in enumerate(both)]
    sums = f"    sum       asked {sum(line['asked_gb']):8.3f} GB   disk {sum(line['disk_gb']):8.3f} GB"
    return "\n".join([head, *rows, sums])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="checkpoint directory; none: random weights of --gb")
    parser.add_argument("--gb", type=float, default=1.0, help="size of a made checkpoint, 10^9 bytes")
    parser.add_argument("--dir", default="", help="where to make it; the default is the temporary directory")
    parser.add_argument("--np", type=int, default=2, help="ranks, where no mpirun has started them")
    parser.add_argument("--tp", type=int, default=0)
    parser.add_argument("--pp", type=int, default=0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--ways", default="direct,striped")
    parser.add_argument("--repeat", type=int, default=1, help="loads of each way")
    parser.add_argument("--warm", action="store_true", help="leave the page cache as it is")
    parser.add_argument("--json", help="append raw lines to this file")
    return parser.parse_args()


def start(asked: argparse.Namespace, path: str) -> int:
    """Ranks on this host, each with this program's own line."""
    mpi_here = mpirun.find(os.environ)
    environ = dict(os.environ) | mpirun.environment(mpi_here, asked.np, os.environ)
    words = [w for key, value in vars(asked).items() if key not in ("model", "warm", "gb", "dir", "np") and value
             for w in (f"--{key}", str(value))] + ["--warm"] * asked.warm  # fmt: skip
    program = [sys.executable, str(Path(__file__).resolve()), path, *words]
    return subprocess.run(mpirun.command(mpi_here, asked.np, program), env=environ).returncode


def main() -> int:
    asked = options()
    place = mpi_env.rank_placement(os.environ)
    if place is not None:
        if not asked.model:
            raise SystemExit("load.py: under mpirun a model's directory is needed, one that every node sees")
        rank_main(asked, Path(asked.model).resolve(), place)
        return 0
    if asked.model:
        return start(asked, asked.model)
    with tempfile.TemporaryDirectory(dir=asked.dir or None) as made:
        make(Path(made), asked.gb)
        return start(asked, made)


if __name__ == "__main__":
    sys.exit(main())
