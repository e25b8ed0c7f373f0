"""Hosts of four GH200: a processor with 72 cores and a GPU on each of four NUMA nodes, and the GPUs' memory as further
nodes, which have no cores. Written down as sysfs and /proc have them; eight nodes are kept for each GPU, as MIG may
divide it, of which one is in use."""

import os
import platform
from collections import namedtuple

import psutil
import pytest
from phalanx import linux_calls
from phalanx.launcher.commands.doctor import facts, host_checks
from phalanx.launcher.commands.doctor.check import OK
from phalanx.launcher.job import binding, visible_devices
from phalanx.launcher.job.mpi_env import RankPlacement
from phalanx.rank import nvml

CORES, HOSTED, OWN = 72, 120 << 20, 96 << 20  # OWN: kB of a GPU's memory, HOSTED: of a processor's
GPU_NODES = (4, 12, 20, 28)
ADDRESSES = [f"00{index}9:01:00.0" for index in range(4)]
Memory = namedtuple("Memory", "total available")


def distances(node: int) -> list[int]:
    """Distances of a node to all: another processor is nearer than the own GPU, and that nearer than another one."""
    processor = lambda one: one if one < 4 else GPU_NODES.index(one)  # noqa: E731
    between = lambda one: 40 if max(node, one) < 4 else 80 if processor(node) == processor(one) else 120  # noqa: E731
    return [10 if one == node else between(one) for one in (*range(4), *GPU_NODES)]


@pytest.fixture
def grace(tmp_path, monkeypatch):
    sys_, proc = tmp_path / "sys", tmp_path / "proc"
    files = {sys_ / "devices/system/cpu/online": f"0-{4 * CORES - 1}", proc / "self/cgroup": "0::/job"}
    for cpu in range(4 * CORES):
        topology = sys_ / f"devices/system/cpu/cpu{cpu}/topology"
        files[topology / "physical_package_id"] = str(cpu // CORES)
        files[topology / "core_id"] = str(cpu % CORES)
    for node in (*range(4), *GPU_NODES):
        folder = sys_ / f"devices/system/node/node{node}"
        files[folder / "cpulist"] = f"{node * CORES}-{node * CORES + CORES - 1}" if node < 4 else ""
        size = HOSTED if node < 4 else OWN
        files[folder / "meminfo"] = (
            f"Node {node} MemTotal: {size:12} kB\nNode {node} MemFree: {size // 2:12} kB\n"
            f"Node {node} Inactive(file): 1024 kB\nNode {node} HugePages_Total: 0"
        )
        files[folder / "distance"] = " ".join(map(str, distances(node)))
    for index, address in enumerate(ADDRESSES):
        files[sys_ / "bus/pci/devices" / address / "numa_node"] = str(index)
        files[proc / "driver/nvidia/gpus" / address / "information"] = (
            f"Model: \t NVIDIA GH200 120GB\nGPU UUID: \t GPU-{index}0000000-1111"
        )
        files[sys_ / f"class/net/hsn{index}/operstate"] = "up"
        files[sys_ / f"class/net/hsn{index}/speed"] = "200000"
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    for module in (binding, facts, linux_calls):
        monkeypatch.setattr(module, "SYS", sys_)
    for module in (binding, visible_devices, linux_calls):
        monkeypatch.setattr(module, "PROC", proc)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4 * CORES)))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    whole = 4 * (HOSTED + OWN) << 10
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(whole, whole // 2))
    return sys_


def test_each_rank_is_bound_beside_its_gpu(grace):
    shares = [binding.choose(RankPlacement(i, 4, i, 4, "srun"), i, {}) for i in range(4)]
    assert [share.node for share in shares] == [0, 1, 2, 3]
    assert [binding.cpu_words(share.cpus) for share in shares] == ["0-71", "72-143", "144-215", "216-287"]
    assert [share.threads for share in shares] == [CORES] * 4


@pytest.mark.parametrize("own, processor", [*zip(GPU_NODES, range(4), strict=True)])
def test_a_node_of_memory_alone_stands_for_the_nearest_cores(grace, own, processor):
    """MAP_NUMA_NODE or the driver may name the GPU's own."""
    address = grace / "bus/pci/devices" / ADDRESSES[processor] / "numa_node"
    address.write_text(f"{own}\n")
    place = RankPlacement(processor, 4, processor, 4, "srun")
    mapped = {"MAP_NUMA_NODE": ",".join([str(own)] * 4)}
    for share in (binding.choose(place, processor, {}), binding.choose(place, -1, mapped)):
        assert share.node == processor and len(share.cpus) == CORES and str(own) in share.words


def test_ranks_on_processors_share_all_cores(grace):
    shares = [binding.choose(RankPlacement(i, 4, i, 4, "srun"), -1, {}) for i in range(4)]
    assert [binding.cpu_words(share.cpus) for share in shares] == ["0-71", "72-143", "144-215", "216-287"]


def test_gpus_memory_is_not_the_hosts(grace, monkeypatch):
    assert list(linux_calls.gpu_memory_nodes()) == list(GPU_NODES)
    total, available = linux_calls.host_memory()
    assert total == 4 * HOSTED << 10 and available == 4 * ((HOSTED // 2 << 10) - (1 << 20))
    # Without an NVIDIA driver, or on another machine, such nodes are memory of the host's own.
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert linux_calls.host_memory() == psutil.virtual_memory()


def test_doctor(grace, monkeypatch):
    gpus = [nvml.Gpu(i, "NVIDIA GH200 120GB", OWN << 10, 0, address) for i, address in enumerate(ADDRESSES)]
    monkeypatch.setattr(nvml, "node", lambda: nvml.Node("580.1", gpus, ["NVLink"]))
    place = RankPlacement(0, 4, 0, 4, "srun")
    found = facts.collect(place, 0, binding.choose(place, 0, {}))
    assert found.cores == 4 * CORES and found.memory == 4 * HOSTED << 10
    assert found.numa == {"0": "0-71", "1": "72-143", "2": "144-215", "3": "216-287"}
    assert found.gpu_nodes == list(GPU_NODES)
    assert found.interfaces == {f"hsn{i}": 200000 for i in range(4)}
    (check,) = host_checks.numa([found])
    assert check.state == OK and "GPU 3 at node 3" in check.text and "4,12,20,28" in check.text
    assert found.bus == ADDRESSES[0] and [gpu.numa for gpu in found.gpus] == [0, 1, 2, 3]
