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


def steps_of(mark, layers, steps):
    """A timeline of 100 us a layer; the second kernel begins before the first has ended."""
    for i in range(layers * steps):
        at = 100.0 * i
        yield from (Span(mark, at, at + 10, 7), Span("gemm", at + 8, at + 58, 7), Span("norm", at + 60, at + 70, 9))


def test_layers_in_the_middle():
    spans = list(steps_of("host_send", 8, 3))
    both = timeline.middle([*spans, Span("group", 0, 1)], 8)
    assert [[row.name for row in rows] for rows in both] == [["host_send", "gemm", "norm"]] * 2
    send, gemm, norm = both[0]
    assert send == (0.0, 30.0, 10.0, 10.0, 7, "host_send")
    assert gemm == (8.0, -2.0, 50.0, 48.0, 7, "gemm")
    assert norm == (60.0, 2.0, 10.0, 10.0, 9, "norm")
    assert len(str(norm).split()) == len(timeline.HEADING.split())
    assert len(timeline.middle(steps_of("group", 8, 3), 8)) == 2
    assert timeline.middle(steps_of("group", 8, 1), 8) == [] == timeline.middle(spans, 0) == timeline.middle([], 8)


def test_decode_steps_run_some_more(monkeypatch):
    ran = []
    monkeypatch.setattr(step.Bench, "run", lambda self, *of: ran.append(of) or 1.0)
    monkeypatch.setattr(step.Bench, "decode", lambda self, *of: dict(ms_per_step=1.0))
    monkeypatch.setattr(timeline, "profiled", lambda run: run() and list(steps_of("group", 4, 3)))
    monkeypatch.setattr(offload.OffloadBench, "all_layers", 4)
    bench = offload.OffloadBench(SimpleNamespace(scheduler=None), 8, step.Clock())
    assert "layers" not in bench.decode(1, 64, 9) and not ran
    monkeypatch.setenv(offload.TIMELINE, "1")
    assert len(bench.decode(1, 64, 9)["layers"]) == timeline.LAYERS and ran == [(1, 64, offload.PROFILED)]


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
