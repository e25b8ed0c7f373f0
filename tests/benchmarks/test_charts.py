"""benchmarks/charts.py: what it draws is what stands in docs/charts, and its limits are those of the models' sizes."""

from xml.etree import ElementTree

import pytest
from phalanx.benchmarks import charts
from phalanx.benchmarks.shapes import LLAMAS


@pytest.mark.parametrize("name", ["peers.svg", "limit.svg"])
def test_the_chart_is_of_the_results(name):
    written = (charts.CHARTS / name).read_text(encoding="utf-8")
    assert written == charts.charts()[name], f"old: {charts.COMMAND}"
    ElementTree.fromstring(written)


def test_bars_are_medians_and_ratios():
    groups = charts.beside_peers()
    assert [bar.label for bar in groups[0].bars] == ["decode 1", "decode 16", "decode 64", "decode 256", "mixed, 512"]
    assert groups[0].bars[0].value == pytest.approx(4.943 / 3.9803)
    assert groups[0].bars[0].words.startswith("1.24: 3.98")
    assert groups[0].bars[-1].words.startswith("1.09: 14.1")  # newer lines of the mixed load
    assert "vLLM 0.25.1" in groups[0].title and "llama.cpp" in groups[-1].title


def test_the_newest_run_on_cpus_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "RESULTS", tmp_path)
    for day in ("2026-11-26", "2026-11-27"):
        (tmp_path / f"cpu-llama-cpp-f32-{day}.jsonl").touch()
    assert charts.on_cpus() == {"cpu-llama-cpp-f32-2026-11-27.jsonl": charts.CPU_TITLE}


def test_the_limit_is_memory_for_few_and_arithmetic_for_prompts():
    shape = LLAMAS["llama3-8b"]
    weights = 7.5e9 * charts.SIZE  # all but the embedding
    assert charts.limit(shape, "decode", 1, 128) == pytest.approx(weights / charts.BANDWIDTH, rel=0.01)
    multiply = 2 * 6.98e9 * 1024 * 16 / charts.FLOPS
    assert charts.limit(shape, "prefill", 16, 1024) == pytest.approx(multiply, rel=0.03)
    assert all(0 < bar.value < 1 for group in charts.beside_the_limit() for bar in group.bars)


def test_text_is_escaped_and_longer_bars_are_longer():
    group = charts.Group("a < b", [charts.Bar("one", 0.5, "half"), charts.Bar("two", 1.0, "all")])
    svg = charts.draw("title", [group], 1.0, {1.0: "end"}, "note")
    bars = [one for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("rect")][1:]
    assert [float(one.get("width")) for one in bars] == [charts.SPAN / 2, charts.SPAN]
    assert "a &lt; b" in svg
