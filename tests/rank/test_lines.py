"""What rank 0 tells the ranks of one copy of the model is no other copy's."""

from types import SimpleNamespace

import pytest
from phalanx.comm import mpi
from phalanx.comm.watch import Watch
from phalanx.rank import __main__ as main
from phalanx.rank.options import Job, Options


@pytest.mark.parametrize("replicas, want", [(1, [range(0, 4)]), (2, [range(0, 2), range(2, 4)])])
def test_a_line_wakes_the_ranks_of_its_copy(monkeypatch, replicas, want):
    opened = []
    monkeypatch.setattr(main.mesh, "lines", lambda world, replicas: list(range(replicas)))
    monkeypatch.setattr(main.control, "gather_bytes", lambda world, data: [data] * 4)
    monkeypatch.setattr(main.control, "MpiControl", lambda *given: opened.append(given))
    monkeypatch.setattr(mpi, "MpiMail", lambda group: None)
    watch = Watch.__new__(Watch)
    main.Rank(Job(options=Options()), SimpleNamespace(rank=0, size=4), [], watch)._open_lines(replicas)
    assert opened == [(group, watch, ranks) for group, ranks in enumerate(want)]
