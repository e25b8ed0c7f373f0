"""Who gets which cores, on machines that are written down as files."""

import os
import re
import subprocess
import sys

import pytest
from phalanx import child_python
from phalanx.errors import FatalError
from phalanx.launcher.job import binding, rank_bootstrap, visible_devices
from phalanx.launcher.job.binding import Share
from phalanx.launcher.job.mpi_env import RankPlacement
from phalanx.rank.options import Job, Options


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two packages of two cores with two threads each; cpus 0-3 are the first threads, 4-7 the second ones."""
    sys_, proc = tmp_path / "sys", tmp_path / "proc"
    for cpu in range(8):
        place = sys_ / f"devices/system/cpu/cpu{cpu}/topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(str(cpu % 4 // 2))
        (place / "core_id").write_text(str(cpu % 2))
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        place = sys_ / f"devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cpus + "\n")
    (sys_ / "devices/system/cpu/online").write_text("0-7\n")
    for index, node in enumerate((1, 0, -1)):
        address = f"0000:0{index}:00.0"
        (sys_ / "bus/pci/devices" / address).mkdir(parents=True)
        (sys_ / "bus/pci/devices" / address / "numa_node").write_text(str(node))
        (proc / "driver/nvidia/gpus" / address).mkdir(parents=True)
        told = f"Model: \t NVIDIA H200\nGPU UUID: \t GPU-{'abc'[index]}0000000-1111\n"
        (proc / "driver/nvidia/gpus" / address / "information").write_text(told)
    (proc / "self").mkdir()
    (proc / "self/cgroup").write_text("0::/job\n")
    monkeypatch.setattr(binding, "SYS", sys_)
    monkeypatch.setattr(binding, "PROC", proc)
    monkeypatch.setattr(visible_devices, "PROC", proc)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return sys_


ALL = list(range(8))


def ranks(count, inherited=None, granted=float("inf")):
    places = [RankPlacement(rank, count, rank, count, "mpirun") for rank in range(count)]
    return [binding.share_of(place, ALL, inherited or ALL, granted) for place in places]


def test_ranks_share_the_cores_evenly_and_whole(machine):
    assert ranks(2) == [Share((0, 1, 4, 5), 2, "cpus 0-1,4-5"), Share((2, 3, 6, 7), 2, "cpus 2-3,6-7")]
    assert [share.cpus for share in ranks(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [share.cpus for share in ranks(3)] == [(0, 1, 4, 5), (2, 6), (3, 7)]
    assert [share.threads for share in ranks(3)] == [2, 1, 1]
    assert ranks(1) == [Share(tuple(ALL), 4, "cpus 0-7")]


def test_more_ranks_than_cores_are_not_bound(machine):
    (share,) = set(ranks(5))
    assert share == Share((), 1, share.words) and "5 ranks" in share.words and "4 cores" in share.words


def test_a_binding_to_one_core_is_widened(machine):
    first, second = ranks(2, inherited=[0, 4])
    assert first == Share((0, 1, 4, 5), 2, first.words) and re.search("cpus 0-1,4-5.*inherited 0,4", first.words)
    assert second.cpus == (2, 3, 6, 7)


def test_one_process_alone_keeps_its_core(machine):
    assert ranks(1, inherited=[1]) == [Share((1,), 1, "cpus 1")]


def test_a_binding_to_a_part_of_the_machine_is_shared_by_those_in_it(machine):
    package = [0, 1, 4, 5]
    assert ranks(2, package)[0] == Share(tuple(package), 2, "cpus 0-1,4-5")
    assert [share.cpus for share in ranks(4, package)[:2]] == [(0, 4), (1, 5)]


def test_no_more_threads_than_the_cgroup_grants(machine):
    assert [share.threads for share in ranks(2, granted=2.0)] == [1, 1]
    assert ranks(1, granted=2.5)[0].threads == 2


def test_gpu_ranks_get_the_gpus_node(machine):
    place = RankPlacement(0, 2, 0, 2, "mpirun")
    words = "cpus 2-3,6-7 of NUMA node 1 (of GPU 0 at 0000:00:00.0)"
    assert binding.choose(place, 0, {}) == Share((2, 3, 6, 7), 2, words, 1)
    assert binding.choose(place, 1, {}).cpus == (0, 1, 4, 5)
    unbound = binding.choose(place, 2, {})
    assert unbound == Share((), 2, unbound.words) and re.search("node -1.*GPU 2.*0000:02:00.0", unbound.words)
    unknown = binding.choose(place, 7, {})
    assert (unknown.cpus, unknown.threads) == ((), 2) and "place" in unknown.words and "GPU 7" in unknown.words


@pytest.mark.parametrize("inherited, ranks, threads", [((0, 1, 4, 5), 1, 2), ((0, 1, 4, 5), 2, 2), ((1,), 4, 1)])
def test_an_unbound_gpu_rank_has_threads_for_the_cpus_that_it_stays_on(machine, monkeypatch, inherited, ranks, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(inherited))
    share = binding.choose(RankPlacement(0, ranks, 0, ranks, "mpirun"), 2, {})
    assert (share.cpus, share.threads) == ((), threads)


@pytest.mark.parametrize("value", ["1,0", "GPU-b,GPU-a", "GPU-b0000000-1111"])
def test_gpus_are_counted_as_cuda_shows_them(machine, value):
    """The first visible GPU is the second one of the machine, at the other node."""
    environ = {"CUDA_VISIBLE_DEVICES": value}
    share = binding.choose(RankPlacement(0, 2, 0, 2, "mpirun"), 0, environ)
    assert (share.cpus, share.node) == ((0, 1, 4, 5), 0)
    assert re.search("GPU 0.*0000:01:00.0", share.words)


def test_map_numa_node_overrides(machine):
    environ = {"MAP_NUMA_NODE": "0,1"}
    assert "NUMA node 1 (MAP_NUMA_NODE)" in binding.choose(RankPlacement(1, 2, 1, 2, "mpirun"), -1, environ).words
    assert binding.choose(RankPlacement(0, 2, 0, 2, "mpirun"), 0, environ).cpus == (0, 1, 4, 5)
    minus = binding.choose(RankPlacement(0, 1, 0, 1, "mpirun"), 0, {"MAP_NUMA_NODE": "-1"})
    assert "node -1 (MAP_NUMA_NODE) means" in minus.words


@pytest.mark.parametrize(
    ("value", "rank", "message"),
    [
        ("0,a", 0, "MAP_NUMA_NODE '0,a' (environment): a list of NUMA nodes such as 0,0,1,1 is needed"),
        ("0,a", 1, ""),
        ("0", 1, "MAP_NUMA_NODE '0' (environment) names no node for local rank 1"),
        ("0", 2, ""),
    ],
)
def test_wrong_maps_are_said_once(machine, value, rank, message):
    with pytest.raises(FatalError) as stop:
        binding.choose(RankPlacement(rank, 3, rank, 3, "mpirun"), 0, {"MAP_NUMA_NODE": value})
    assert (str(stop.value), stop.value.code) == (message, 2)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("local_rank, cpus, node", [(0, (2, 3, 6, 7), 1), (1, (0, 1, 4, 5), 0)])
def test_a_rank_is_bound_before_it_has_experts_or_threads(machine, monkeypatch, mapped, local_rank, cpus, node):
    """The node of MAP_NUMA_NODE or of the GPU: the exec, which keeps both, comes before the rank's allocations."""
    did = []
    if mapped:
        monkeypatch.setenv("MAP_NUMA_NODE", "1,0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(rank_bootstrap, "device_index", lambda *_: -1 if mapped else local_rank)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: did.append(cpus))
    monkeypatch.setattr(binding, "prefer_memory", lambda node: did.append(node) or "")
    monkeypatch.setattr(os, "execve", lambda program, words, environ: did.append((words, environ)))
    rank_bootstrap.exec_rank(Job(options=Options(model="m")), RankPlacement(local_rank, 2, local_rank, 2, "mpirun"))
    bound, preferred, (words, environ) = did
    wanted = child_python.command(*rank_bootstrap.RANK)
    assert (bound, preferred, words, environ["OMP_NUM_THREADS"]) == (cpus, node, wanted, "2")


def test_a_node_outside_the_cgroup(machine):
    group = machine / "fs/cgroup/job"
    group.mkdir(parents=True)
    (group / "cpuset.cpus.effective").write_text("0-1\n")
    (group / "cpu.max").write_text("150000 100000\n")
    assert binding.allowed() == [0, 1]
    assert binding.quota() == 1.5
    share = binding.choose(RankPlacement(0, 1, 0, 1, "mpirun"), 0, {})
    assert share.cpus == () and share.threads == 2
    assert "bound: NUMA node 1" in share.words


def test_without_a_cgroup_limit(machine):
    assert binding.allowed() == ALL
    assert binding.quota() == float("inf")
    (machine / "fs/cgroup/job").mkdir(parents=True)
    (machine / "fs/cgroup/job/cpu.max").write_text("max 100000\n")
    assert binding.quota() == float("inf")


def test_the_old_cgroup_layout(machine):
    (binding.PROC / "self/cgroup").write_text("3:cpuset:/slurm/job\n1:cpu:/\n0::/\n")
    group = machine / "fs/cgroup/cpuset/slurm/job"
    group.mkdir(parents=True)
    (group / "cpuset.effective_cpus").write_text("2-3\n")
    assert binding.allowed() == [2, 3]


def test_lists_of_cpus():
    assert binding.cpu_list("0-2,8, 10-11\n") == [0, 1, 2, 8, 10, 11]
    assert binding.cpu_words([11, 0, 1, 2, 8, 10]) == "0-2,8,10-11"
    assert binding.cpu_list("") == []


def test_this_machine():
    assert set(os.sched_getaffinity(0)) <= set(binding.allowed())
    assert binding.quota() > 0


def test_torch_sees_the_share():
    """Bound and counted before torch is imported, by the same interpreter."""
    code = (
        "import os; from phalanx.launcher.job import binding as bind; cpu = min(os.sched_getaffinity(0));"
        "environ = dict(os.environ); bind.apply(bind.Share((cpu,), 1, ''), environ);"
        "assert os.sched_getaffinity(0) == {cpu}, os.sched_getaffinity(0); print(environ['OMP_NUM_THREADS'])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert (done.stdout, done.stderr) == ("1\n", "")
    kept = {"OMP_NUM_THREADS": "5"}
    binding.apply(Share((), 1, ""), kept)
    assert kept == {"OMP_NUM_THREADS": "5"}


MEMORY = """
import os, sys
from phalanx.launcher.job import binding as bind, visible_devices as visible
words = bind.apply(bind.Share((), 1, "cpus 0", NODE), {})
assert words == "cpus 0, " + (bind.memory_words() or "memory not bound: Operation not permitted"), words
code = "from phalanx.launcher.job import binding as bind; print(bind.memory_words())"
os.execv(sys.executable, [sys.executable, "-c", code])
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_memory_of_the_node_is_preferred_and_exec_keeps_it():
    done = run(MEMORY.replace("NODE", "0"))
    assert done.returncode == 0, done.stderr
    assert "node 0" in done.stdout or done.stdout == "\n"  # containers often forbid it
    assert binding.memory_words() == ""


def test_memory_of_a_node_that_is_not_there():
    done = run("from phalanx.launcher.job.binding import *; print(apply(Share((), 1, 'cpus 0', 900), {}))")
    assert re.search("memory.*(Invalid argument|not permitted)\n", done.stdout)


def test_a_machine_whose_calls_are_not_known(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert re.search("cpus 0.*bound.*riscv64", binding.apply(Share((), 1, "cpus 0", 0), {}))
