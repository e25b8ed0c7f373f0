"""Finds which ranks share a host and checks that all run the same Phalanx version: the first thing after MPI_Init."""

from __future__ import annotations

import socket
from pathlib import Path

from .. import __version__, errors
from .base import Comm
from .broadcast import gather_bytes


def name_hosts(world: Comm) -> list[str]:
    """Each rank's host by a unique name: from here on equal names mean the same host. Collective over world.

    Raises FatalError where a rank runs another version, whose protocol may differ.
    """
    mine = f"{socket.gethostname()}\n{__version__}\n{_boot_id()}".encode()
    words = [text.decode().split("\n") for text in gather_bytes(world, mine)]
    for rank, (host, version, *_) in enumerate(words):
        if version != words[0][1]:
            text = f"rank {rank} on {host} has Phalanx {version}, rank 0 on {words[0][0]} has {words[0][1]}; all nodes "
            raise errors.FatalError(text + "need the same" if world.rank == rank else "", errors.USAGE)
    return _tell_apart([(host, boot) for host, _, boot in words])


def _boot_id() -> str:
    """Tells nodes of equal name apart, as containers and cloned images have; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _tell_apart(hosts: list[tuple[str, str]]) -> list[str]:
    """Unique names for hosts given as (name, boot id): `node`, and `node#2` for a second host of that name."""
    names: dict[tuple[str, str], str] = {}
    for host in hosts:
        if host not in names:
            namesakes = sum(name == host[0] for name, _ in names)
            names[host] = f"{host[0]}#{namesakes + 1}" if namesakes else host[0]
    return [names[host] for host in hosts]
