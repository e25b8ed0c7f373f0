"""Facts that each rank's small launcher process knows of its place: collected before MPI starts, without torch."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from typing import Any

import msgspec

from .... import linux_calls
from ....rank import nvml
from ...job import binding, mpi_env, visible_devices
from ...job.linux import text_of
from ...job.mpi_env import RankPlacement

SYS = binding.SYS
PACKAGES = ("phalanx", "mpi4py", "torch", "cupy-cuda13x", "cupy-cuda12x", "safetensors", "numpy", "ziglang", "tornado",
            "msgspec")  # fmt: skip


class Gpu(nvml.Gpu, frozen=True):
    numa: int = -1  # node; -1: unknown


class Facts(msgspec.Struct, frozen=True):
    """One rank's. What belongs to its host is filled in by the host's first rank alone."""

    rank: int
    local_rank: int
    host: str
    gpu: int  # index of its GPU as CUDA counts for it; -1: it computes on the CPU
    bound: str  # in words, as the rank would be
    is_bound: bool
    python: str
    packages: dict[str, str]
    bus: str = ""  # the GPU's PCI address; "": unknown
    is_whole: bool = True  # no MIG device, of which several have one address
    cores: int = 0  # that the job may use
    inherited: str = ""  # processors that whoever started us gave this process
    memory: int = 0  # bytes of the host, or of the container
    free: int = 0
    shm: int = -1  # bytes free in /dev/shm
    gpus: list[Gpu] = []
    driver: str = ""
    no_gpus: str = ""  # why they could not be read
    topology: list[str] = []  # kinds of links between the GPUs, the commonest first
    numa: dict[str, str] = {}  # node → its processors
    gpu_nodes: list[int] = []  # NUMA nodes that are GPUs' memory
    interfaces: dict[str, int] = {}  # network → Mbit/s; -1: unknown


def collect(place: RankPlacement, gpu: int, share: binding.Share) -> Facts:
    """The host's resources before `share` is applied."""
    inherited = binding.cpu_words(sorted(linux_calls.processors()))
    shown = visible_devices.listed(os.environ) or [""]
    facts = Facts(
        rank=place.rank,
        local_rank=place.local_rank,
        host=mpi_env.hostname(),
        gpu=gpu,
        bus=visible_devices.locate(gpu, os.environ)[0] if gpu >= 0 else "",
        is_whole=not shown[0].startswith("MIG-"),
        bound=share.words,
        is_bound=bool(share.cpus),
        python=platform.python_version(),
        packages=packages(),
        inherited=inherited,
    )
    if place.local_rank:
        return facts
    total, free = memory()
    return msgspec.structs.replace(
        facts,
        cores=len(binding.by_core(binding.allowed())),
        memory=total,
        free=free,
        shm=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else -1,
        numa=numa(),
        gpu_nodes=list(linux_calls.gpu_memory_nodes()),
        interfaces=interfaces(),
        **gpus(),
    )


def packages() -> dict[str, str]:
    """Versions of those that ranks must have alike; missing ones are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def memory() -> tuple[int, int]:
    """Bytes in all and available, of the host or of the container's limit where that is less."""
    total, free = linux_calls.host_memory()
    limit, usage = SYS / "fs/cgroup/memory.max", SYS / "fs/cgroup/memory.current"
    try:
        most, used = int(limit.read_text()), int(usage.read_text())
    except (OSError, ValueError):  # no limit: the file says `max`
        return total, free
    return min(total, most), min(free, max(0, most - used))


def gpus() -> dict[str, Any]:
    """Fields of Facts."""
    try:
        node = nvml.node()
    except OSError as error:
        return {"no_gpus": str(error)}
    found = [Gpu(**msgspec.structs.asdict(one), numa=binding.numa_node(one.bus)) for one in node.gpus]
    return {"gpus": found, "driver": node.driver, "topology": node.links}


def numa() -> dict[str, str]:
    nodes = binding.node_folders(SYS).items()
    return {str(node): text_of(path / "cpulist") for node, path in nodes if text_of(path / "cpulist")}


def interfaces() -> dict[str, int]:
    """Networks that are up, and InfiniBand's ports, with their rates in Mbit/s."""
    found: dict[str, int] = {}
    for path in sorted((SYS / "class/net").glob("*")):
        if path.name != "lo" and text_of(path / "operstate") in ("up", "unknown"):
            speed = text_of(path / "speed")
            found[path.name] = int(speed) if speed.lstrip("-").isdigit() else -1
    for path in sorted((SYS / "class/infiniband").glob("*/ports/*/rate")):
        rate = text_of(path).split()  # `200 Gb/sec (4X HDR)`
        active = "ACTIVE" in text_of(path.with_name("state"))
        if rate and active:
            found[path.parts[-4]] = int(float(rate[0]) * 1000)
    return found
