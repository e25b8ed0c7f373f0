"""Hosts, devices, NUMA nodes, binding, memory and ports."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ...job.binding import cpu_words
from .check import FAIL, OK, WARN, Check, gb
from .facts import Facts, Gpu
from .probe_report import ProbeReport, RankFacts

LITTLE_SHM = 256 << 20  # bytes: MPI and NCCL put their buffers between ranks there
LITTLE_MEMORY = 0.1  # of a host's


def hosts(facts: Sequence[Facts]) -> list[Check]:
    checks = []
    for one in (one for one in facts if one.local_rank == 0):
        ranks = sum(other.host == one.host for other in facts)
        text = f"{one.host}: {ranks} rank{'s' * (ranks > 1)}, {one.cores} cores"
        checks.append(Check("host", OK, text))
    return checks


def memory(facts: Sequence[Facts]) -> list[Check]:
    checks = []
    for one in (one for one in facts if one.local_rank == 0):
        text = f"{one.host}: {gb(one.free)} free of {gb(one.memory)}"
        if one.free < LITTLE_MEMORY * one.memory:
            checks.append(Check("memory", WARN, text, "see who else uses it, or choose another host"))
        else:
            checks.append(Check("memory", OK, text))
        if 0 <= one.shm < LITTLE_SHM:
            text = f"{one.host}: {gb(one.shm)} free in /dev/shm"
            checks.append(Check("memory", WARN, text, "give a container more: --shm-size 1g"))
    return checks


def devices(facts: Sequence[RankFacts], found: ProbeReport) -> list[Check]:
    checks = [Check("device", FAIL, one.problem, "see --d and --device") for one in facts if one.problem]
    for one in (one for one in facts if one.local_rank == 0):
        for gpu in one.gpus:
            text = f"{one.host}: GPU {gpu.index}, {gpu.name}, {gb(gpu.total)}, driver {one.driver}"
            if gpu.used > 0.05 * gpu.total and not any(r.host == one.host and _is_of(gpu, r) for r in facts):
                checks.append(Check("device", WARN, f"{text}, {gb(gpu.used)} in use", "another program is on it"))
            else:
                checks.append(Check("device", OK, text))
        if not one.gpus:
            text = f"{one.host}: no GPU that the driver shows, ranks compute on the CPU"
            if one.gpu < 0:
                checks.append(Check("device", OK, text))
            else:
                text = f"{one.host}: GPUs are there, but cannot be read: {one.no_gpus or 'the driver shows none'}"
                checks.append(Check("device", WARN, text, "`pip install nvidia-ml-py`, or see `nvidia-smi`"))
    checks += _shared(facts)
    if found.gpu.problem:
        checks.append(Check("device", FAIL, "GPUs cannot be used", found.gpu.problem))
    return checks


def _is_of(gpu: Gpu, one: Facts) -> bool:
    """The rank's index is taken for NVML's where its address is not known."""
    return one.bus == gpu.bus if one.bus else one.gpu == gpu.index


def _shared(facts: Sequence[Facts]) -> list[Check]:
    """Ranks that were shown the same GPU."""
    owners: dict[tuple[str, str], list[int]] = {}
    for one in facts:
        if one.bus and one.is_whole:
            owners.setdefault((one.host, one.bus), []).append(one.rank)
    advice = "let every rank see all GPUs of its node, or let srun give each one with --gpus-per-task=1"
    return [
        Check("device", FAIL, f"{host}: ranks {cpu_words(ranks)} compute on the same GPU, at {bus}", advice)
        for (host, bus), ranks in owners.items()
        if len(ranks) > 1
    ]


def numa(facts: Sequence[Facts]) -> list[Check]:
    checks = []
    for one in (one for one in facts if one.local_rank == 0):
        words = [f"node {node} cpus {cpus}" for node, cpus in one.numa.items()] or ["unknown"]
        words += [f"GPU {gpu.index} at node {gpu.numa}" for gpu in one.gpus if gpu.numa >= 0]
        if one.gpu_nodes:
            words.append(f"GPUs' memory is node {cpu_words(one.gpu_nodes)}, which no host memory here counts")
        lost = [str(gpu.index) for gpu in one.gpus if gpu.numa < 0]
        text = f"{one.host}: {', '.join(words)}"
        if lost and len(one.numa) > 1:
            advice = "MAP_NUMA_NODE=0,0,1,1 names the node of each local rank"
            checks.append(Check("numa", WARN, f"{text}; the node of GPU {','.join(lost)} is unknown", advice))
        else:
            checks.append(Check("numa", OK, text))
    return checks


def binding(facts: Sequence[Facts]) -> list[Check]:
    """One line for all ranks of a host that are bound alike."""
    alike: dict[tuple[str, str], list[Facts]] = {}
    for one in facts:
        alike.setdefault((one.host, one.bound), []).append(one)
    single = {one.host for one in facts if one.local_rank == 0 and len(one.numa) < 2}
    checks = []
    for (host, bound), group in alike.items():
        ranks = f"rank{'s' * (len(group) > 1)} {cpu_words([one.rank for one in group])}"
        text = f"{ranks} on {host}: {bound}"
        if group[0].is_bound:
            checks.append(Check("binding", OK, text))
        elif "ranks on" in bound:
            checks.append(Check("binding", WARN, text, "start fewer ranks, or ask for more cores"))
        elif host in single:
            checks.append(Check("binding", OK, f"{text}, and there is one node only"))
        else:
            checks.append(Check("binding", WARN, text, "MAP_NUMA_NODE=0,0,1,1 names the node of each local rank"))
    return checks


def port(host: str, number: int) -> Check:
    """Whether the server could listen there."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, number))
    except OSError as error:
        return Check("port", WARN, f"{host}:{number}: {error.strerror}", "--port 0 picks a free one, --port N another")
    return Check("port", OK, f"{host}:{number} is free")
