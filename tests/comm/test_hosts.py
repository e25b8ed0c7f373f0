"""Which ranks share a host: what the watch's addresses and the division of its memory follow from."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from phalanx import __version__
from phalanx.comm import hosts, threads
from phalanx.errors import FatalError
from phalanx.rank.worker.engine import RankContext


def met(monkeypatch, *said):
    """The result of name_hosts() for the ranks' names and boot ids."""
    words = [f"{name}\n{__version__}\n{boot}".encode() for name, boot in said]
    monkeypatch.setattr(hosts, "gather_bytes", lambda world, mine: words)
    return hosts.name_hosts(SimpleNamespace(rank=0))


def test_nodes_of_one_name_are_told_apart(monkeypatch):
    names = met(monkeypatch, ("node", "b"), ("node", "b"), ("node", "a"), ("other", "c"), ("node", "d"), ("node", "a"))
    assert names == ["node", "node", "node#2", "other", "node#3", "node#2"]
    places = [RankContext(SimpleNamespace(rank=r), names, None, None, None) for r in range(6)]
    assert [place.ranks_here for place in places] == [2, 2, 2, 1, 1, 2]


def test_containers_of_one_kernel_are_hosts_of_their_own(monkeypatch):
    assert met(monkeypatch, ("node0", "b"), ("node1", "b"), ("node0", "b")) == ["node0", "node1", "node0"]


def test_where_no_boot_id_can_be_read_the_name_decides(monkeypatch):
    assert met(monkeypatch, ("node", ""), ("node", ""), ("other", "")) == ["node", "node", "other"]

    def refused(self):
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refused)
    assert hosts._boot_id() == ""


def test_ranks_of_this_machine_share_it():
    assert len(hosts._boot_id()) == 36
    assert threads.run(hosts.name_hosts, 2) == [[socket.gethostname()] * 2] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_another_version_says_less_or_more(monkeypatch, rank):
    """It is refused before anything else of it is read."""
    words = [f"here\n{__version__}\nb".encode(), b"there\n9.9"]
    monkeypatch.setattr(hosts, "gather_bytes", lambda world, mine: words)
    with pytest.raises(FatalError) as caught:
        hosts.name_hosts(SimpleNamespace(rank=rank))
    want = f"rank 1 on there has Phalanx 9.9, rank 0 on here has {__version__}; all nodes need the same"
    assert str(caught.value) == (want if rank else "")
