"""MPI, and how fast ranks reach each other."""

from __future__ import annotations

from collections.abc import Sequence

from ....rank import nvml
from .check import FAIL, OK, WARN, Check
from .facts import Facts
from .probe_report import ProbeReport, Rate

# Suspicious times of the smallest all-reduce, in us: it takes far less in shared memory and over NCCL, and a few
# hundred where more ranks spin than there are cores.
SLOW_HERE, SLOW_THERE = 200.0, 500.0
SLOW_NETWORK = 1.0  # GB/s between hosts: an Ethernet of 10 Gbit/s gives that
SKEW = 1.0  # seconds: logs and deadlines of different hosts no longer fit together


def ranks(found: ProbeReport) -> Check:
    count = len(set(found.hosts))
    where = "1 host" if count == 1 else f"{count} hosts"
    return Check("ranks", OK, f"{len(found.ranks)} met on {where} in {found.joined_s:.1f} s")


def all_reduce(found: ProbeReport, facts: Sequence[Facts]) -> list[Check]:
    if len(found.ranks) < 2:
        return [Check("links", OK, "one rank: nothing to measure; --np 2 starts two")]
    apart = len(set(found.hosts)) > 1
    checks = [_rates("MPI", found.all_reduce, apart, crowded(facts))]
    if found.gpu.all_reduce:
        checks.append(_rates("NCCL", found.gpu.all_reduce, apart, False))
    for one in facts:
        if one.local_rank == 0 and len(one.gpus) > 1 and one.topology:
            if one.topology[0] == nvml.NVLINK:
                others = f" (also {', '.join(one.topology[1:])})" if one.topology[1:] else ""
                checks.append(Check("links", OK, f"{one.host}: NVLink between its GPUs{others}"))
            else:
                text = f"{one.host}: no NVLink between its GPUs ({', '.join(one.topology)})"
                checks.append(Check("links", WARN, text, "pipeline stages (--pp) need less of it than --tp"))
    return checks


def crowded(facts: Sequence[Facts]) -> bool:
    """Whether some host has more ranks than cores."""
    return any(sum(other.host == one.host for other in facts) > one.cores for one in facts if one.local_rank == 0)


def _rates(name: str, rates: Sequence[Rate], apart: bool, crowd: bool) -> Check:
    words = ", ".join(f"{_size(rate.bytes)} {rate.us:.0f} us ({rate.gbps:.3g} GB/s)" for rate in rates)
    text = f"all-reduce over {name}: {words}"
    if crowd and rates[0].us > SLOW_HERE:
        return Check("links", WARN, text, "there are more ranks than cores: start fewer")
    if rates[0].us > (SLOW_THERE if apart else SLOW_HERE):
        advice = (
            "is the fast network used? Open MPI: --mca btl_tcp_if_include; UCX: UCX_NET_DEVICES"
            if apart
            else "other programs are on these cores"
        )
        return Check("links", WARN, text, advice)
    if apart and rates[-1].gbps < SLOW_NETWORK:
        advice = "keep tensor groups inside a node (--tp) and put pipeline stages (--pp) between nodes"
        return Check("links", WARN, text, advice)
    return Check("links", OK, text)


def _size(count: int) -> str:
    return f"{count >> 20} MB" if count >= 1 << 20 else f"{count >> 10} KB"


def networks(facts: Sequence[Facts]) -> list[Check]:
    checks = []
    for one in (one for one in facts if one.local_rank == 0):
        words = [f"{name} {rate / 1000:g} Gbit/s" if rate > 0 else name for name, rate in one.interfaces.items()]
        text = f"{one.host}: {', '.join(words) or 'none is up'}"
        checks.append(
            Check("network", OK if words or len(facts) == 1 else WARN, text, "" if words else "loopback only")
        )
    return checks


def clocks(found: ProbeReport) -> list[Check]:
    checks = []
    for clock in found.clocks:
        text = f"{clock.host} is {round(clock.ahead_s * 1e3, 1) + 0.0:+.1f} ms beside {found.hosts[0]}"
        if abs(clock.ahead_s) > SKEW + clock.round_trip_s:
            checks.append(Check("clock", WARN, text, "logs will not fit together: ask for NTP or chrony on the hosts"))
        else:
            checks.append(Check("clock", OK, text))
    return checks or [Check("clock", OK, "one host, one clock")]


def mpi(name: str, found: ProbeReport | None) -> Check:
    """`name`: who starts the ranks; the ranks themselves know which library they loaded."""
    library = " ".join(found.library.split(",")[0].split()) if found is not None else ""
    return Check("mpi", OK, ", ".join(text for text in (library, name) if text))


def failed(text: str, advice: str) -> Check:
    return Check("ranks", FAIL, text, advice)
