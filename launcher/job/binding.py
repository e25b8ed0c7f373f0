"""Binds a rank to its cores before torch is imported, as torch keeps the first affinity and thread count it sees.

CPU ranks of a host share the cores evenly; first touch places their memory. A rank with a GPU gets the cores and, while
it has some, the memory of the GPU's NUMA node, or of the node that MAP_NUMA_NODE names for its local rank. A node of -1
means that the rank is not bound, which is logged. visible_devices.py maps CUDA's index to the machine's GPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ... import linux_calls
from ...errors import USAGE, FatalError
from . import visible_devices
from .linux import text_of
from .mpi_env import RankPlacement

SYS = Path("/sys")
PROC = Path("/proc")


class Share(msgspec.Struct, frozen=True):
    """The CPUs of one rank. Empty `cpus`: not bound."""

    cpus: tuple[int, ...]
    threads: int  # that torch should use
    words: str  # for the log
    node: int = -1  # whose memory is preferred; -1: none


def cpu_list(text: str) -> list[int]:
    """`0-3,8` as [0, 1, 2, 3, 8]."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


def cpu_words(cpus: tuple[int, ...] | list[int]) -> str:
    """[0, 1, 2, 3, 8] as `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def allowed() -> list[int]:
    """The CPUs of this process's cgroup, to which an inherited binding may be widened."""
    for line in text_of(PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        roots = (
            [SYS / "fs/cgroup"] if not controllers else [SYS / "fs/cgroup/cpuset"] if "cpuset" in controllers else []
        )
        for root in roots:
            for place in (root / path.lstrip("/"), root):  # in a container the path may be the host's
                for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
                    if text := text_of(place / name):
                        return cpu_list(text)
    return cpu_list(text_of(SYS / "devices/system/cpu/online")) or sorted(linux_calls.processors())


def quota() -> float:
    """The cgroup's CPU quota, in CPUs; infinite without a limit."""
    for line in text_of(PROC / "self/cgroup").splitlines():
        path = line.split(":", 2)[2].lstrip("/")
        for name in (SYS / "fs/cgroup" / path / "cpu.max", SYS / "fs/cgroup/cpu.max"):
            limit, _, period = text_of(name).partition(" ")
            if limit.isdigit():
                return int(limit) / int(period or 100000)
    return float("inf")


def by_core(cpus: list[int]) -> list[list[int]]:
    """The CPUs grouped by physical core, in the order of the machine."""
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(cpus):
        place = SYS / f"devices/system/cpu/cpu{cpu}/topology"
        package, core = text_of(place / "physical_package_id"), text_of(place / "core_id")
        key = (int(package), int(core)) if package and core else (0, 1_000_000 + cpu)
        cores.setdefault(key, []).append(cpu)
    return [cores[key] for key in sorted(cores)]


def share_of(place: RankPlacement, cpus: list[int], inherited: list[int], granted: float = float("inf")) -> Share:
    """A CPU rank's share. cpus: of the cgroup. inherited: this process's affinity. granted: the CPU quota."""
    widened = ""
    base = inherited
    if len(by_core(inherited)) == 1 < len(by_core(cpus)) and place.local_size > 1:
        base, widened = cpus, f", widened from the inherited {cpu_words(inherited)}"
    # A launcher that bound this rank to a part of the machine bound the others to the other parts.
    sharing = max(1, round(place.local_size * len(base) / max(len(base), len(cpus))))
    cores = by_core(base)
    most = max(1, int(granted / place.local_size)) if granted != float("inf") else len(cores)
    if sharing > len(cores):
        return Share((), 1, f"not bound: {sharing} ranks on {_cores(len(cores))}")
    if sharing == 1:
        return Share(tuple(sorted(base)), min(len(cores), most), f"cpus {cpu_words(base)}{widened}")
    each, more = divmod(len(cores), sharing)
    index = place.local_rank % sharing
    first = index * each + min(index, more)
    part = cores[first : first + each + (index < more)]
    mine = sorted(cpu for core in part for cpu in core)
    return Share(tuple(mine), min(len(part), most), f"cpus {cpu_words(mine)}{widened}")


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"


def numa_node(address: str) -> int:
    """The NUMA node of the device with this PCI address; -1 when unknown."""
    text = text_of(SYS / "bus/pci/devices" / address / "numa_node")
    return int(text) if text.lstrip("-").isdigit() else -1


def mapped_node(place: RankPlacement, environ: Mapping[str, str]) -> int | None:
    """This local rank's node in MAP_NUMA_NODE=0,0,1,1; None where that is not set."""
    text = environ.get("MAP_NUMA_NODE", "").strip()
    if not text:
        return None
    nodes = text.split(",")
    if not all(one.strip().lstrip("-").isdigit() for one in nodes):
        why = f"MAP_NUMA_NODE {text!r} (environment): a list of NUMA nodes such as 0,0,1,1 is needed"
        raise FatalError(why if place.local_rank == 0 else "", USAGE)  # one rank of each host prints it
    if place.local_rank >= len(nodes):
        why = f"MAP_NUMA_NODE {text!r} (environment) names no node for local rank {place.local_rank}"
        raise FatalError(why if place.local_rank == len(nodes) else "", USAGE)
    return int(nodes[place.local_rank])


def node_folders(sys: Path) -> dict[int, Path]:
    """The NUMA nodes that are online, with their folders in sysfs."""
    found = {int(path.name[4:]): path for path in (sys / "devices/system/node").glob("node[0-9]*")}
    return dict(sorted(found.items()))


def with_cores(node: int) -> int:
    """The node, or if it has memory only, as GPUs' own nodes of a Grace host do, the nearest one that has cores."""
    folders = node_folders(SYS)
    if node not in folders or text_of(folders[node] / "cpulist"):
        return node
    distances = dict(zip(folders, map(int, text_of(folders[node] / "distance").split()), strict=False))
    near = [other for other in distances if text_of(folders[other] / "cpulist")]
    return min(near, key=lambda other: distances[other], default=node)


def on_node(node: int, source: str, place: RankPlacement, cpus: list[int]) -> Share:
    """All cores of a NUMA node. Ranks that compute on GPUs may share them."""
    if (near := with_cores(node)) != node:
        node, source = near, f"the nearest with cores to {node}, {source}"
    here = cpu_list(text_of(SYS / f"devices/system/node/node{node}/cpulist")) if node >= 0 else []
    mine = sorted(set(here) & set(cpus))
    if not mine:
        why = "means that none is known" if node < 0 else "has no core that this job may use"
        return _unbound(place, cpus, f"NUMA node {node} ({source}) {why}")
    threads = max(1, len(by_core(cpus)) // place.local_size)
    return Share(
        tuple(mine), min(threads, len(by_core(mine))), f"cpus {cpu_words(mine)} of NUMA node {node} ({source})", node
    )


def _unbound(place: RankPlacement, cpus: list[int], why: str) -> Share:
    """The binding of a GPU's rank: it stays on the CPUs that it has, with threads for its part of these."""
    inherited = sorted(linux_calls.processors() & set(cpus)) or cpus
    sharing = max(1, round(place.local_size * len(inherited) / max(len(inherited), len(cpus))))
    return Share((), max(1, len(by_core(inherited)) // sharing), f"not bound: {why}")


def choose(place: RankPlacement, gpu: int, environ: Mapping[str, str]) -> Share:
    """This rank's share. gpu: CUDA's index of its device, -1 on the CPU."""
    cpus = allowed()
    node = mapped_node(place, environ)
    if node is not None:
        return on_node(node, "MAP_NUMA_NODE", place, cpus)
    if gpu >= 0:
        address, why = visible_devices.locate(gpu, environ)
        if not address:
            return _unbound(place, cpus, f"the place of GPU {gpu} is not known: {why}")
        return on_node(numa_node(address), f"of GPU {gpu} at {address}", place, cpus)
    return share_of(place, cpus, sorted(linux_calls.processors()), quota())


def apply(share: Share, environ: dict[str, str]) -> str:
    """Bind this process, also across exec, and set torch's thread count in `environ`. Returns a text for the log."""
    if share.cpus:
        linux_calls.bind(share.cpus)
    environ.setdefault("OMP_NUM_THREADS", str(share.threads))
    if share.node < 0:
        return share.words
    why = prefer_memory(share.node)
    return f"{share.words}, " + (f"memory not bound: {why}" if why else memory_words())


# set_mempolicy(2), get_mempolicy(2). Preferred, not bound: what does not fit on the node spills over to others, where a
# binding would end the job. In containers without CAP_SYS_NICE the calls are often forbidden.
_SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_PREFERRED = 1
_NODES = 1024  # bits of a node mask: the most that Linux supports


def prefer_memory(node: int) -> str:
    """Prefer a NUMA node's memory, also across exec. Returns "" or the reason why that failed."""
    if platform.machine() not in _SYSCALLS:
        return f"not known how on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * (_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    done = libc.syscall(_SYSCALLS[platform.machine()][0], _PREFERRED, mask, ctypes.c_ulong(_NODES))
    return "" if done == 0 else os.strerror(ctypes.get_errno())


def memory_words() -> str:
    """The node whose memory this process prefers, as a text; "" for first touch."""
    if platform.machine() not in _SYSCALLS:
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_NODES // 64))()
    call = _SYSCALLS[platform.machine()][1]
    if libc.syscall(call, ctypes.byref(mode), mask, ctypes.c_ulong(_NODES), None, ctypes.c_ulong(0)):
        return ""
    nodes = [i for i in range(_NODES) if mask[i // 64] >> i % 64 & 1]
    return f"memory of node {cpu_words(nodes)} first" if mode.value == _PREFERRED and nodes else ""
