"""Which ranks share a host, and that all have the same Phalanx: asked first when they have joined."""

from __future__ import annotations

import socket
from pathlib import Path

from .. import __version__, errors
from .base import Comm
from .broadcast import gather_bytes


def name_hosts(world: Comm) -> list[str]:
    """Every rank's host, under a name that no other one has: equal names are one host from here on.

    Raises Stop where a rank has another Phalanx, which need not speak our protocol.
    """
    mine = f"{socket.gethostname()}\n{__version__}\n{_boot_id()}".encode()
    words = [text.decode().split("\n") for text in gather_bytes(world, mine)]
    for rank, (host, version, *_) in enumerate(words):
        if version != words[0][1]:
            text = f"rank {rank} on {host} has Phalanx {version}, rank 0 on {words[0][0]} has {words[0][1]}; all nodes "
            raise errors.FatalError(text + "need the same" if world.rank == rank else "", errors.USAGE)
    return _tell_apart([(host, boot) for host, _, boot in words])


def _boot_id() -> str:
    """What differs where nodes have the same name, as containers and cloned images may."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _tell_apart(hosts: list[tuple[str, str]]) -> list[str]:
    """Names of hosts that are given by name and boot id: `node`, and `node#2` for another one that is called so."""
    names: dict[tuple[str, str], str] = {}
    for host in hosts:
        if host not in names:
            namesakes = sum(name == host[0] for name, _ in names)
            names[host] = f"{host[0]}#{namesakes + 1}" if namesakes else host[0]
    return [names[host] for host in hosts]
