"""The first start on CPUs says what it waits for."""

from types import SimpleNamespace

import pytest
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.rank import __main__ as main
from phalanx.rank.options import Job, Options

SAID = "compiling C++ kernels for this processor; the next start on this machine finds them"


@pytest.mark.parametrize("number, missing, said", [(0, True, [SAID]), (1, True, []), (0, False, [])])
def test_kernels_are_compiled_with_a_word(monkeypatch, caplog, number, missing, said):
    compiled = []
    monkeypatch.setattr(main.ops, "to_compile", lambda: missing)
    monkeypatch.setattr(main.ops, "available", lambda: compiled.append(list(caplog.messages)))
    rank = main.Rank(Job(options=Options()), SimpleNamespace(rank=number, size=2), [], LocalWatchdog())
    with caplog.at_level("INFO"):
        rank._compile_kernels()
    assert compiled == [said], "it is said before"
