"""Shares of a GPU's time, and when benchmarks/offload.py asks for them."""

from types import SimpleNamespace

from phalanx.benchmarks import offload, step, timeline
from phalanx.benchmarks.timeline import Span, summary, union


def test_shares():
    copy = "Memcpy HtoD (Pinned -> Device)"
    spans = [
        Span(copy, 0, 4000),
        Span(copy, 4000, 6000),
        Span("gemm", 5000, 7000),
        Span("move", 5500, 8000),
        Span("Memset", 9000, 10000),
    ]
    found = summary(spans)
    by_name = found.pop("by_name")
    assert found == dict(whole=10.0, copies=6.0, kernels=3.0, both=1.0, neither=1.0)
    assert by_name == {copy: 6.0, "move": 2.5, "gemm": 2.0, "Memset": 1.0}
    assert [(one.begin, one.end) for one in union(spans)] == [(0, 8000), (9000, 10000)]


def test_the_last_prompt_of_a_kind_runs_once_more(monkeypatch):
    ran, said = [], []
    monkeypatch.setattr(step.Bench, "run", lambda self, *of: ran.append(of) or 1.0)
    monkeypatch.setattr(step, "say", lambda **line: said.append(line))
    monkeypatch.setattr(timeline, "profiled", lambda run: [Span("gemm", 0, run() * 1e4)])
    bench = offload.OffloadBench(SimpleNamespace(scheduler=None), 8, step.Clock())
    bench.clock.taken["launch"].append(0.25)
    for _ in range(2):
        assert [bench.run(1, 64, new) for new in (4, 1, 1, 1)] == [1.0] * 4
        monkeypatch.setenv(offload.TIMELINE, "1")
    assert ran == [(1, 64, 4), *[(1, 64, 1)] * 3] * 2 + [(1, 64, 1)]
    (line,) = said
    assert (line["what"], line["launch"], line["whole"], line["neither"]) == ("timeline", 250.0, 10.0, 0.0)
