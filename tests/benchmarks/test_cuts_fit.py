"""Fits of the models that cuts of GEMMs are chosen by, to times that such a model has made."""

from phalanx.benchmarks import cuts_fit
from phalanx.kernels.quantized import q8_0_cuda, wgmma_cuts
from phalanx.kernels.quantized.wgmma_cuts import COSTS, WgmmaConfig


def line(rows, costs):
    """As benchmarks/quantized.py --ways writes it."""
    found = dict(what="q8_0", rows=rows, outputs=6144, inputs=4096, bf16=1.0, gemv1a8b2=2.0)
    for cut in wgmma_cuts.configs(rows, 4096, q8_0_cuda.LAYOUT, False):
        name = "m{}n{}k{}s{}x{}".format(*cut)
        found[name] = wgmma_cuts.time(cut, rows, 6144, 4096, q8_0_cuda.LAYOUT, 132, costs) / cuts_fit.CYCLES
    return found


def test_costs_that_made_the_times_are_found(monkeypatch):
    made = COSTS._replace(launch=2 * COSTS.launch, matmul=COSTS.matmul / 2)
    shapes = [cuts_fit.of_registers(line(rows, made)) for rows in (64, 256)]
    assert shapes[0].lost(shapes[0].reckoned(made)) == 0 and cuts_fit.off(shapes, made) < 1e-9
    monkeypatch.setattr(cuts_fit, "ROUNDS", 60)
    before, after = (
        cuts_fit.off(shapes, COSTS),
        cuts_fit.off(shapes, cuts_fit.search(shapes, COSTS, dict(together=8.0))),
    )
    assert after < before / 2


def test_lines_of_other_kernels_and_of_the_file_that_is_kept():
    kept = dict(format="q4_k", rows=64, outputs=6144, inputs=4096)
    kept["us"] = {"bf16": 15.0, "(256, 64, 128, 4, 1, 1)": 16.0, "(256, 64, 128, 4, 1, 0)": 17.0}
    assert cuts_fit.of_registers(kept).times == {WgmmaConfig(256, 64, 128, 4, 1): 16.0}
    of_e4m3 = dict(what="fp8", rows=64, outputs=6144, inputs=4096, e128n64s1x1w1m64=9.0)
    assert not cuts_fit.of_registers(of_e4m3).times and len(cuts_fit.of_e4m3(of_e4m3).times) == 1
    assert not cuts_fit.of_registers(line(64, COSTS) | dict(what="fp8")).times
