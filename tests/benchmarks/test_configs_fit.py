"""Fits of the models that choose GEMMs' tile configurations, to times that such a model has made."""

from pathlib import Path

from phalanx.benchmarks import configs_fit
from phalanx.kernels.quantized import cuda_layouts, e4m3_wgmma, quantized_wgmma
from phalanx.kernels.quantized.quantized_wgmma import COSTS, WgmmaConfig


def line(rows, costs):
    """A line as benchmarks/quantized.py --ways writes it."""
    found = dict(what="q8_0", rows=rows, outputs=6144, inputs=4096, bf16=1.0, gemv1a8b2=2.0)
    for config in quantized_wgmma.configs(rows, 4096, cuda_layouts.Q8_0, False):
        name = "m{}n{}k{}s{}".format(*config)
        found[name] = quantized_wgmma.time(config, rows, 6144, 4096, cuda_layouts.Q8_0, 132, costs) / configs_fit.CYCLES
    return found


def test_costs_that_made_the_times_are_found(monkeypatch):
    made = COSTS._replace(launch=2 * COSTS.launch, matmul=COSTS.matmul / 2)
    shapes = [configs_fit.of_registers(line(rows, made)) for rows in (64, 256)]
    assert shapes[0].lost(shapes[0].reckoned(made)) == 0 and configs_fit.off(shapes, made) < 1e-9
    monkeypatch.setattr(configs_fit, "ROUNDS", 60)
    before, after = (
        configs_fit.off(shapes, COSTS),
        configs_fit.off(shapes, configs_fit.search(shapes, COSTS, dict(together=8.0))),
    )
    assert after < before / 2


def test_lines_of_other_kernels_and_of_the_file_that_is_kept():
    kept = dict(format="q4_k", rows=64, outputs=6144, inputs=4096)
    kept["us"] = {"bf16": 15.0, "(256, 64, 128, 4, 1, 1)": 16.0, "(256, 64, 128, 4, 1, 0)": 17.0}
    assert configs_fit.of_registers(kept).times == {WgmmaConfig(256, 64, 128, 4): 16.0}
    of_e4m3 = dict(what="fp8", rows=64, outputs=6144, inputs=4096, e128n64s1x1w1m64=9.0)
    assert not configs_fit.of_registers(of_e4m3).times
    (config,) = configs_fit.of_e4m3(of_e4m3 | dict(e128n64s1x2w1m64=8.0)).times
    assert config == e4m3_wgmma.E4m3Config(128, 64, 1, matmul=64)
    assert not configs_fit.of_registers(line(64, COSTS) | dict(what="fp8")).times
    assert not configs_fit.of_e4m3(of_e4m3 | dict(rows=8192)).times  # costs do not choose its tile


def test_costs_are_written(monkeypatch, tmp_path):
    source = tmp_path / "e4m3_wgmma.py"
    source.write_text(Path(e4m3_wgmma.__file__).read_text())
    monkeypatch.setattr(e4m3_wgmma, "__file__", str(source))
    before = source.read_text()
    configs_fit.write(e4m3_wgmma, e4m3_wgmma.COSTS._replace(launch=4321.0))
    after = source.read_text()
    first, second = after.split("\nCOSTS = Costs(")
    assert before.startswith(first) and "launch=4321,\n)" in second
