"""Messages of rank 0 to one replica's ranks do not reach another's."""

from types import SimpleNamespace

import pytest
from phalanx.comm import mpi
from phalanx.comm.watchdog import Watchdog
from phalanx.rank import __main__ as main
from phalanx.rank.options import Job, Options


@pytest.mark.parametrize("replicas, want", [(1, [range(0, 4)]), (2, [range(0, 2), range(2, 4)])])
def test_a_line_wakes_the_ranks_of_its_copy(monkeypatch, replicas, want):
    opened = []
    monkeypatch.setattr(main.mesh, "control_groups", lambda world, replicas: dict(enumerate(range(replicas))))
    monkeypatch.setattr(main.broadcast, "gather_bytes", lambda world, data: [data] * 4)
    monkeypatch.setattr(main.broadcast, "MpiPlanBroadcast", lambda *given: opened.append(given))
    monkeypatch.setattr(mpi, "MpiResultChannel", lambda group: None)
    watch = Watchdog.__new__(Watchdog)
    main.Rank(Job(options=Options()), SimpleNamespace(rank=0, size=4), [], watch)._open_lines(replicas)
    assert opened == [(group, watch, ranks) for group, ranks in enumerate(want)]
