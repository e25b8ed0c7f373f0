"""The doctor's verdicts on facts: every line that it can print, with what to do."""

import socket

import msgspec
from phalanx.launcher.commands.doctor import facts, host_checks, links, software
from phalanx.launcher.commands.doctor.check import FAIL, OK, WARN, Check, gb, worst
from phalanx.launcher.commands.doctor.facts import Gpu
from phalanx.launcher.commands.doctor.probe_report import Clock, OnGpus, ProbeReport, RankFacts, Rate
from phalanx.launcher.job import binding
from phalanx.launcher.job.mpi_env import RankPlacement
from phalanx.rank import nvml

GB = 10**9


def rank(number=0, host="a", local=None, **more):
    here = number if local is None else local
    first = {"cores": 8, "memory": 100 * GB, "free": 50 * GB, "shm": 10 * GB, "numa": {"0": "0-7"}} if here == 0 else {}
    basis = {
        "rank": number, "local_rank": here, "host": host, "gpu": -1, "bound": f"cpus {number}", "is_bound": True,
        "python": "3.11.7", "packages": {"phalanx": "0.1", "torch": "2.13"},
    }  # fmt: skip
    return RankFacts(**(basis | first | more))


def lines(checks):
    return [one.line() for one in checks]


def reads(checks, *wanted):
    """Each line has its state, its title and its values."""
    for line, words in zip(lines(checks), wanted, strict=True):
        assert not [one for one in words if one not in line], line


def test_a_line():
    assert Check("port", OK, "free").line() == "OK    port         free"
    assert "use; choose another" in Check("port", WARN, "in use", "choose another").line()
    assert gb(1_234_567_890) == "1.23 GB"
    assert worst([Check("a", OK, ""), Check("b", WARN, ""), Check("c", FAIL, "")]) == FAIL
    assert worst([Check("a", OK, ""), Check("b", WARN, "")]) == WARN
    assert worst([]) == OK


# Software


def test_this_python_and_its_packages():
    assert software.python().state == software.packages().state == OK
    oldest, wanted = software.requirements()
    assert oldest == "3.11" and wanted["mpi4py"] == "4.1" and wanted["torch"] == "2.11"
    assert software.number("2.11.0+cu130") == (2, 11, 0)


def test_packages_that_are_missing_or_old(monkeypatch):
    monkeypatch.setattr(software, "requirements", lambda: ("3.99", {"torch": "99.0", "no-such-package": "1"}))
    assert "; 3.99" in software.python().line()
    found = software.packages()
    assert found.state == FAIL
    assert "missing: no-such-package;" in found.text and "(>=99.0)" in found.text
    assert "`make install`" in found.advice


def test_without_a_setup_cfg(monkeypatch, tmp_path):
    monkeypatch.setattr(software, "SETUP", tmp_path / "none")
    monkeypatch.setattr(software.metadata, "metadata", lambda _: {"Requires-Python": ">=3.11"})
    monkeypatch.setattr(software.metadata, "requires", lambda _: ["mpi4py>=4.1", 'pytest>=8; extra == "test"'])
    assert software.requirements() == ("3.11", {"mpi4py": "4.1"})


def test_hosts_with_other_versions():
    other = rank(1, "b", 0, packages={"phalanx": "0.1", "torch": "2.12"})
    (found,) = software.alike([rank(), other])
    assert "2.13); install" in found.line()
    (found,) = software.alike([rank(), rank(1, "b", 0, packages={"torch": "2.13"})])
    assert found.state == FAIL and found.text.startswith("b ") and "missing" in found.text
    assert software.alike([rank(), rank(1)]) == []


# Place


def test_hosts_and_memory():
    ranks = [rank(0), rank(1), rank(2, "b", 0, free=5 * GB, shm=2 << 20)]
    reads(host_checks.hosts(ranks), ["OK    host ", "a: 2 ranks", "8 cores"], ["OK    host ", "b: 1 rank,", "8 cores"])
    reads(
        host_checks.memory(ranks),
        ["OK    memory ", "a: 50 GB", "100 GB"],
        ["WARN  memory ", "b: 5 GB", "100 GB", "another host"],
        ["WARN  memory ", "b: 0.0021 GB", "/dev/shm", "--shm-size"],
    )


GPU = Gpu(0, "NVIDIA H200", 150 * GB, 1 * GB, "0000:19:00.0", 0)


def test_devices():
    reads(host_checks.devices([rank()], ProbeReport("")), ["OK    device ", "a: no GPU", "CPU"])
    busy = msgspec.structs.replace(GPU, index=1, used=90 * GB)
    here = rank(gpu=0, gpus=[GPU, busy], driver="580.1")
    reads(
        host_checks.devices([here], ProbeReport("")),
        ["OK    device ", "a: GPU 0", "NVIDIA H200", "150 GB", "driver 580.1"],
        ["WARN  device ", "a: GPU 1", "90 GB in use", "another program"],
    )
    assert host_checks.devices([here, rank(1, gpu=1)], ProbeReport(""))[1].state == OK  # ours
    assert "--d and --device" in lines(host_checks.devices([rank(problem="a has 0 GPUs")], ProbeReport("")))[0]
    (unread,) = host_checks.devices([rank(gpu=0, no_gpus="no nvidia-ml-py")], ProbeReport(""))
    assert unread.state == WARN and "no nvidia-ml-py" in unread.text and "nvidia-smi" in unread.advice
    found = ProbeReport("", gpu=OnGpus("several GPUs need CuPy with NCCL (x): `pip install phalanx[gpu]`"))
    assert "`pip install phalanx[gpu]`" in lines(host_checks.devices([here], found))[-1]


def test_devices_that_cuda_counts_anew():
    """With CUDA_VISIBLE_DEVICES=1 a rank's GPU 0 is NVML's GPU 1."""
    busy = msgspec.structs.replace(GPU, index=1, used=90 * GB, bus="0000:3b:00.0")
    ours = rank(gpu=0, bus=busy.bus, gpus=[GPU, busy])
    assert [one.state for one in host_checks.devices([ours], ProbeReport(""))] == [OK, OK]
    foreign = msgspec.structs.replace(GPU, used=90 * GB)
    ours = rank(gpu=0, bus=busy.bus, gpus=[foreign, busy])
    assert [one.state for one in host_checks.devices([ours], ProbeReport(""))] == [WARN, OK]


def test_ranks_on_the_same_gpu():
    same = [rank(number, gpu=0, bus=GPU.bus, gpus=[GPU] if number == 0 else []) for number in range(2)]
    first, found = host_checks.devices([*same, rank(2, "b", 0, gpu=0, bus=GPU.bus, gpus=[GPU])], ProbeReport(""))[::2]
    assert first.state == OK
    assert found.state == FAIL and "ranks 0-1" in found.text and "0000:19:00.0" in found.text
    parts = [msgspec.structs.replace(one, is_whole=False) for one in same]
    assert [one.state for one in host_checks.devices(parts, ProbeReport(""))] == [OK]


def test_the_gpu_of_a_rank(monkeypatch):
    monkeypatch.setattr(facts.visible_devices, "locate", lambda index, environ: (f"address of {index}", ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5")
    other = RankPlacement(1, 2, 1, 2, "mpirun")
    found = facts.collect(other, 3, binding.Share((), 1, ""))
    assert (found.gpu, found.bus, found.is_whole) == (3, "address of 3", False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = facts.collect(other, -1, binding.Share((), 1, ""))
    assert (found.bus, found.is_whole) == ("", True)


def test_numa():
    two = {"0": "0-3", "1": "4-7"}
    lost = msgspec.structs.replace(GPU, numa=-1)
    nodes = ["node 0 cpus 0-3", "node 1 cpus 4-7"]
    reads(host_checks.numa([rank(numa=two, gpus=[GPU]), rank(1)]), ["OK    numa ", *nodes, "GPU 0 at node 0"])
    reads(host_checks.numa([rank(numa=two, gpus=[lost])]), ["WARN  numa ", *nodes, "GPU 0", "MAP_NUMA_NODE=0,0,1,1"])
    assert host_checks.numa([rank(gpus=[lost])])[0].state == OK  # one node: nothing to choose
    assert lines(host_checks.numa([rank(numa={})])) == ["OK    numa         a: unknown"]


def test_binding():
    alike = [rank(i, bound="cpus 0-7 of NUMA node 0 (of GPU 0)") for i in range(3)]
    cpus = ["ranks 0-2", "cpus 0-7", "node 0", "GPU 0"]
    reads(host_checks.binding([*alike, rank(3)]), ["OK    binding ", *cpus], ["OK    binding ", "rank 3", "cpus 3"])
    crowd = rank(bound="not bound: 3 ranks on 2 cores", is_bound=False)
    reads(host_checks.binding([crowd]), ["WARN  binding ", "rank 0", "3 ranks", "2 cores", "fewer"])
    unknown = rank(bound="not bound: NUMA node -1 (of GPU 0) means that none is known", is_bound=False)
    reads(host_checks.binding([unknown]), ["OK    binding ", "rank 0", "node -1", "GPU 0"])
    two = msgspec.structs.replace(unknown, numa={"0": "0-3", "1": "4-7"})
    assert "MAP_NUMA_NODE=0,0,1,1" in host_checks.binding([two])[0].advice


def test_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert f"port         127.0.0.1:{number}: Address already" in host_checks.port("127.0.0.1", number).line()
    assert f"OK    port         127.0.0.1:{number}" in host_checks.port("127.0.0.1", number).line()


# Links

FAST = [Rate(16384, 15.0, 1.1), Rate(1 << 20, 300.0, 3.5), Rate(64 << 20, 30000.0, 2.2)]
SLOW = [Rate(16384, 900.0, 0.02), Rate(64 << 20, 90000.0, 0.7)]


FABRIC = "is the fast network used? Open MPI: --mca btl_tcp_if_include; UCX: UCX_NET_DEVICES"


def found(hosts=("a", "a"), rates=FAST, **more):
    return ProbeReport("", "Open MPI v5.0.11, package: x", 1.25, ["{}"] * len(hosts), list(hosts), [], rates, **more)


def test_who_met():
    assert "ranks        2 met" in links.ranks(found()).line()
    assert "2 hosts" in links.ranks(found(("a", "b"))).text
    assert links.mpi("5.0 (/mpirun)", found()).text.endswith("v5.0.11, 5.0 (/mpirun)")
    assert links.mpi("5.0 (/mpirun)", None).text == "5.0 (/mpirun)"
    assert links.failed("no", "why").line() == "FAIL  ranks        no; why"


def test_all_reduces():
    pair = [rank(), rank(1)]
    (one,) = links.all_reduce(found(), pair)
    rates = "16 KB 15 us (1.1 GB/s), 1 MB 300 us (3.5 GB/s), 64 MB 30000 us (2.2 GB/s)"
    assert f"all-reduce over MPI: {rates}" in one.line()
    (one,) = links.all_reduce(found(rates=SLOW), pair)
    assert one.state == WARN and "programs" in one.advice
    (one,) = links.all_reduce(found(rates=SLOW), [rank(cores=1), rank(1)])
    assert one.state == WARN and "fewer" in one.advice
    apart = [rank(), rank(1, "b", 0)]
    (one,) = links.all_reduce(found(("a", "b"), SLOW), apart)
    assert (one.state, one.advice) == (WARN, FABRIC)
    (one,) = links.all_reduce(found(("a", "b"), [FAST[0], SLOW[1]]), apart)
    assert "--pp" in one.advice
    reads(links.all_reduce(found(("a",), []), [rank()]), ["OK    links ", "one rank", "--np 2"])


def test_gpus_links():
    gpus = [GPU, msgspec.structs.replace(GPU, index=1)]
    seen = found(gpu=OnGpus("", [Rate(16384, 17.0, 1.0), Rate(64 << 20, 266.0, 252.0)]))
    nvlink = links.all_reduce(seen, [rank(gpus=gpus, topology=["NVLink"]), rank(1)])
    reads(nvlink[1:], ["OK    links ", "NCCL: 16 KB 17 us", "266 us (252 GB/s)"], ["OK    links ", "a: NVLink"])
    (*_, pcie) = links.all_reduce(seen, [rank(gpus=gpus, topology=["SYS", "PIX"]), rank(1)])
    assert "pipeline stages (--pp) need" in pcie.line()


def test_networks_and_clocks():
    two = {"eth0": 25000, "hsn0": -1}
    reads(links.networks([rank(interfaces=two), rank(1)]), ["OK    network ", "a: eth0 25 Gbit/s", "hsn0"])
    assert links.networks([rank()])[0].text == "a: none is up"
    reads(links.clocks(found()), ["OK    clock ", "one host"])
    seen = found(("a", "b"))
    seen = msgspec.structs.replace(seen, clocks=[Clock("b", 0.0021, 1e-4), Clock("c", -3.5, 1e-4)])
    reads(links.clocks(seen), ["OK    clock ", "b is +2.1 ms"], ["WARN  clock ", "c is -3500.0 ms", "chrony"])


# Facts


def test_facts_of_this_machine():
    here = facts.collect(RankPlacement(0, 2, 0, 2, "mpirun"), -1, binding.Share((0,), 1, "cpus 0"))
    assert here.host == socket.gethostname() and here.cores >= 1 and 0 < here.free <= here.memory
    assert here.packages["msgspec"] and here.bound
    other = facts.collect(RankPlacement(1, 2, 1, 2, "mpirun"), -1, binding.Share((0,), 1, "cpus 0"))
    assert (other.cores, other.memory) == (0, 0)  # told by the host's first rank


def test_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(binding, "SYS", tmp_path / "sys")
    file = tmp_path / "sys/bus/pci/devices/0000:19:00.0/numa_node"
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    found = [nvml.Gpu(index, "NVIDIA H200", 100, 4, f"0000:{bus}:00.0") for index, bus in enumerate(("19", "3b"))]
    monkeypatch.setattr(facts.nvml, "node", lambda: nvml.Node("580.1", found, ["NVLink"]))
    told = facts.gpus()
    assert told["gpus"][0] == Gpu(0, "NVIDIA H200", 100, 4, "0000:19:00.0", 1)
    assert (told["gpus"][1].numa, told["driver"], told["topology"]) == (-1, "580.1", ["NVLink"])

    def missing():
        raise OSError("no library")

    monkeypatch.setattr(facts.nvml, "node", missing)
    assert facts.gpus() == {"no_gpus": "no library"}


def test_sysfs(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "SYS", tmp_path)
    files = {
        "devices/system/node/node0/cpulist": "0-3", "devices/system/node/node1/cpulist": "4-7",
        "devices/system/node/node10/cpulist": "8", "class/net/lo/operstate": "unknown",
        "class/net/eth0/operstate": "up", "class/net/eth0/speed": "25000", "class/net/eth1/operstate": "down",
        "class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "class/infiniband/mlx5_1/ports/1/rate": "200 Gb/sec (4X HDR)",
        "class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "fs/cgroup/memory.max": "1000", "fs/cgroup/memory.current": "400",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert facts.numa() == {"0": "0-3", "1": "4-7", "10": "8"}
    assert facts.interfaces() == {"eth0": 25000, "mlx5_0": 200000}
    assert facts.memory() == (1000, 600)
    assert tmp_path != binding.SYS
