"""Devices' abilities, for predictions: vendors' figures, scaled by the shares of them that were measured.

Measured on H200 (2026-11-20 and 21): 4.52 of 4.8 TB/s, 680 of 989 TFLOP/s in bf16; an all-reduce of 64 MB over two GPUs
moves 252 of NVLink's 450 GB/s. In steps of Llama 8B replayed as CUDA graphs a GEMM with weights takes 3 to 7 us more
than its bytes (kernels' ramp up and down), a small kernel 2 to 4 us, by how many rows there are. Other GPUs are assumed
to reach the same shares of their data sheets. CPUs: f32 on two cores with AVX-512; `phalanx doctor` measures this
machine's and saves it for `fit`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

GIB = 1 << 30
STREAM = 0.94  # of a GPU's memory bandwidth that reading weights reaches
MATRIX = 0.69  # of its FLOP/s that large GEMMs reach
# Times the FLOP/s of 16 bits that tensor cores of 8 bits reach, with what makes e4m3 of x: on H200 (2026-11-26) Llama
# 8B's prompts of 8191 and of 16 x 1024 tokens are 1.41 and 1.55 times as fast, attention included, and the experts of
# Qwen3-30B 1.54 times, of 8192 tokens. Only Hopper has kernels that use them.
FP8 = 1.6
HOPPER = "H200", "H100", "GH200", "H20"
NVLINK = 100  # GB/s: more is no PCIe
WIRE = 0.56  # of its link's bandwidth that an all-reduce reaches


class Host(msgspec.Struct, frozen=True):
    """One rank's part of its host, for experts that lie in its memory."""

    bandwidth: float  # bytes of its memory that the rank's cores and copies to its GPU read a second together
    cpu: float  # that its cores read alone
    flops: float  # that they reach with experts
    source: str


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's device. Rates are what is reached, per second; times in seconds."""

    name: str
    memory: float  # bytes that a program may use
    bandwidth: float  # bytes of its memory
    flops: float  # in bf16 and f16
    flops_f32: float
    fp8: float = 1.0  # times the FLOP/s of 16 bits that FP8 weights of many rows reach
    link: float  # bytes between devices of a host in an all-reduce, as nccl-tests' bus bandwidth counts
    latency: float = 17e-6  # of a small all-reduce
    ramp: float = 3.5e-6  # that a GEMM with weights takes beside reading them
    small: float = 2.5e-6  # of a kernel that does little
    runtime: float = 0.0  # bytes of driver, libraries and workspaces
    group: float = 0.0  # bytes more where several ranks talk
    cpu: bool = False
    source: str = ""
    host: Host | None = None  # None: as `host` has it of one rank, of which nothing is known


def _gpu(name: str, gib: float, tbs: float, tflops: float, tflops_f32: float, link: float, source: str) -> Device:
    """Memory in GiB as nvidia-smi shows it, rates of the data sheet: dense bf16, link in GB/s for one direction."""
    return Device(
        name=name,
        memory=(gib - HIDDEN) * GIB,
        bandwidth=tbs * 1e12 * STREAM,
        flops=tflops * 1e12 * MATRIX,
        flops_f32=tflops_f32 * 1e12 * MATRIX,
        fp8=FP8 if name in HOPPER else 1.0,
        link=link * 1e9 * WIRE,
        latency=7e-6 if link > NVLINK else 17e-6,  # by one kernel over mapped memory; by NCCL
        runtime=RUNTIME,
        group=GROUP,
        source=source,
    )


HIDDEN = 0.6  # GiB of those that nvidia-smi shows which the driver keeps from programs
RUNTIME = 1.55e9  # CUDA's context, cuBLAS' workspace, kernels, torch's allocator; measured
GROUP = 0.56e9  # NCCL's buffers and mapped regions: 0.4e9 measured on two H200, and comm/dma_allreduce.py's since

_SHEET = "the data sheet, scaled by shares measured on H200"
DEVICES = {
    device.name: device
    for device in (
        _gpu("H200", 140.4, 4.8, 989, 67, 450, "measured"),
        _gpu("H100", 79.6, 3.35, 989, 67, 450, _SHEET),
        _gpu("GH200", 95.6, 4.0, 989, 67, 450, _SHEET),
        _gpu("H20", 95.6, 4.0, 148, 44, 450, _SHEET),
        _gpu("A100", 80.0, 2.04, 312, 19.5, 300, _SHEET),
        _gpu("A100-40GB", 40.0, 1.555, 312, 19.5, 300, _SHEET),
        _gpu("B200", 179.1, 8.0, 2250, 75, 900, _SHEET),
        _gpu("L40S", 45.0, 0.864, 362, 91.6, 32, _SHEET),
        _gpu("L4", 22.5, 0.3, 121, 30.3, 32, _SHEET),
        _gpu("RTX4090", 24.0, 1.008, 165, 82.6, 32, _SHEET),
        _gpu("RTX5090", 31.8, 1.792, 209, 104.8, 64, _SHEET),
    )
}
# Cards that --gpu-mem alone is taken for, by the gigabytes on the box.
SOLD = {
    141: "H200",
    80: "H100",
    96: "GH200",
    40: "A100-40GB",
    180: "B200",
    192: "B200",
    48: "L40S",
    24: "RTX4090",
    32: "RTX5090",
}


class CpuSpeed(msgspec.Struct, frozen=True):
    """A host's processors, all cores together."""

    host: str
    cores: int
    gflops: float  # of f32 GEMMs
    gbps: float  # reading memory, GB/s
    all_reduce_us: float = 0.0  # of 16 KB between two ranks of the host; 0: not measured
    date: str = ""


# Two cores of a machine with AVX-512 and no AMX; the all-reduce in shared memory.
TYPICAL = CpuSpeed("", 2, 224.0, 21.0, 15.0)


def typical(cores: int) -> CpuSpeed:
    """Cores add arithmetic; sockets, not cores, add memory bandwidth beyond some ten of them."""
    gbps = min(TYPICAL.gbps * cores / TYPICAL.cores, 100.0)
    return msgspec.structs.replace(TYPICAL, cores=cores, gflops=TYPICAL.gflops * cores / TYPICAL.cores, gbps=gbps)


# Experts in host memory, one rank with an H200 and 16 cores with AMX of a shared host (h200-offload-2026-11-27.txt):
# the CPU read one sequence's missing experts, 5.8 MB of a layer, at 70 (CJ) and 90 GB/s (CH); of layers of 1 and 16
# sequences with all missing, the CPU and copies together read 85 to 110 until both were done (CK, CJ; six machines with
# older code 74 to 114); the CPU computes 1.0 to 1.4 TFLOP/s where each expert has 64 tokens.
CORES = 16
RANK_HOST, RANK_CPU = 98e9, 78e9
CORE_FLOPS = 1.1e12 / CORES
EXPERTS = CORE_FLOPS / (TYPICAL.gflops * 1e9 / TYPICAL.cores)  # of a core's f32 GEMMs, where these are typical
HOST = 200e9  # bytes/s of a host's own memory, two sockets; assumed, not measured


def host(speed: CpuSpeed | None, ranks: int) -> Host:
    """The share of one of `ranks` that share a host evenly. speed: what `doctor` measured; None: nothing."""
    if speed is None:
        source = f"assumed: {CORES} cores with AMX for each rank; `phalanx doctor` measures a host's"
        together = min(RANK_HOST, HOST / ranks)
        return Host(together, min(RANK_CPU, together), CORES * CORE_FLOPS, source)
    source = f"{speed.cores} cores for {ranks} rank{'s' * (ranks > 1)}, {measured(speed)}"
    memory = speed.gbps * 1e9 / ranks  # that copies share
    return Host(memory, memory, speed.gflops * 1e9 * EXPERTS / ranks, source)


def measured(speed: CpuSpeed) -> str:
    return f"measured on {speed.host} by phalanx doctor, {speed.date}"


def cpu(speed: CpuSpeed, ranks: int, memory: float, source: str) -> Device:
    """One of `ranks` that share a host's processors evenly."""
    return Device(
        name="CPU",
        memory=memory,
        bandwidth=speed.gbps * 1e9 / ranks,
        flops=speed.gflops * 1e9 / ranks,  # ranks on CPUs compute in f32, whatever the checkpoint's type
        flops_f32=speed.gflops * 1e9 / ranks,
        link=3.4e9,  # of an all-reduce in shared memory
        latency=(speed.all_reduce_us or TYPICAL.all_reduce_us) * 1e-6,
        ramp=10e-6,  # of a packed GEMM
        small=10e-6,
        runtime=0.35e9,  # of a process with torch
        cpu=True,
        source=source,
    )


def speed_file(environ: Mapping[str, str]) -> Path:
    """The file in which `doctor` leaves what it measured of this host."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "/tmp", ".cache")
    return Path(base) / "phalanx" / "cpu-speed.json"


def save_speed(speed: CpuSpeed, environ: Mapping[str, str]) -> Path:
    """Raises OSError where the cache directory cannot be written."""
    path = speed_file(environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(msgspec.structs.asdict(speed), indent=1) + "\n"
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)
    return path


def saved_speed(environ: Mapping[str, str]) -> CpuSpeed | None:
    """The speeds that `doctor` measured; None where it did not run, or left nothing readable."""
    try:
        return msgspec.json.decode(speed_file(environ).read_bytes(), type=CpuSpeed)
    except (OSError, msgspec.MsgspecError):
        return None
