"""The ranks' findings, as comm/probe.py writes them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .facts import Facts


class Rate(msgspec.Struct, frozen=True):
    """An all-reduce over all ranks."""

    bytes: int
    us: float  # median
    gbps: float  # bus bandwidth: 2 (n - 1) / n of the bytes in the time


class Clock(msgspec.Struct, frozen=True):
    host: str
    ahead_s: float  # of rank 0's host
    round_trip_s: float


class OnGpus(msgspec.Struct, frozen=True):
    problem: str = ""
    all_reduce: list[Rate] = []
    torch: str = ""


class RankFacts(Facts, frozen=True):
    problem: str = ""  # why it has no device


class ProbeReport(msgspec.Struct, frozen=True):
    error: str
    library: str = ""
    joined_s: float = 0.0  # from the start of rank 0 to the end of MPI_Init, Python's imports included
    ranks: list[str] = []  # JSON of each rank's facts
    hosts: list[str] = []
    clocks: list[Clock] = []
    all_reduce: list[Rate] = []
    gpu: OnGpus = OnGpus()

    @property
    def facts(self) -> list[RankFacts]:
        return [msgspec.json.decode(text, type=RankFacts) for text in self.ranks]


def read(path: Path) -> ProbeReport | None:
    """The report; None where the ranks left none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProbeReport)
    except (OSError, msgspec.MsgspecError):
        return None
