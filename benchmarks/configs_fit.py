"""Fits the costs by which GEMMs' tile configurations are chosen to measured times (benchmarks/quantized.py --fit)."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.kernels.quantized import cuda_layouts, e4m3_wgmma, quantized_wgmma
from phalanx.kernels.quantized.e4m3_wgmma import E4m3Config
from phalanx.kernels.quantized.packed_gemm import Layout
from phalanx.kernels.quantized.quantized_wgmma import WgmmaConfig
from phalanx.kernels.quantized.super_blocks import q4_k, q6_k

OF_E4M3 = re.compile(r"e(\d+)n(\d+)s(\d+)x(\d+)w(\d+)(?:m(\d+))?")
# The second form is h200-quantized-ways-2026-11-25.jsonl's, whose last numbers are 1 where no tiles share x and scales
# are fetched ahead, as now.
OF_REGISTERS = re.compile(r"m(\d+)n(\d+)k(\d+)s(\d+)(?:x1)?|\((\d+), (\d+), (\d+), (\d+), 1, 1\)")
# Weights as they are kept now: codes of Q6_K have 6 bits; in files up to 2026-11-27 they had 8.
LAYOUTS: dict[str, Layout] = {
    "q8_0": cuda_layouts.Q8_0,
    "int4": cuda_layouts.int4(64, False),
    "int4-zeros": cuda_layouts.int4(64, True),
    "q4_k": cuda_layouts.super_blocks(q4_k.type.form),
    "q6_k": cuda_layouts.super_blocks(q6_k.type.form),
}
ROUNDS, NUM_SMS, CYCLES = 1500, 132, 1755  # CYCLES: of an H200's multiprocessor in a us
# Bytes that an H200's second level gives in a nanosecond, at most: past it, tiles that share operands cost the same as
# others, and the first of them is chosen, though it may be a fifth slower.
MOST = {e4m3_wgmma: dict(together=8.0, second_level=7000.0), quantized_wgmma: dict(together=8.0)}
FOUND = 3.0  # weight of what a choice loses, beside how far times are off

TILES = {tile for tile, _ in e4m3_wgmma.TILES}  # files have others, too, that were not worth it

Costs = Any  # of e4m3_wgmma or of quantized_wgmma


class Shape(NamedTuple):
    """The times of one GEMM, in us."""

    rows: int
    outputs: int
    inputs: int
    times: dict[Any, float]
    time: Callable[[Any, Costs], float]  # of a config, by these costs

    def reckoned(self, costs: Costs) -> dict[Any, float]:
        return {config: self.time(config, costs) for config in self.times}

    def lost(self, reckoned: dict[Any, float]) -> float:
        """The ratio of the chosen config's time to the fastest's."""
        return self.times[min(reckoned, key=lambda config: reckoned[config])] / min(self.times.values()) - 1


def of_e4m3(line: dict[str, Any]) -> Shape:
    """Shapes that large_config() has a tile for have no times: costs do not choose it."""
    times: dict[Any, float] = {}
    sizes, alike = (line["rows"], line["outputs"], line["inputs"]), line.get("alike", 1)
    by_costs = e4m3_wgmma.large_config(*sizes[:2], alike, NUM_SMS) is None
    for key, value in line.items():
        if by_costs and (match := OF_E4M3.fullmatch(key)):
            config = E4m3Config(*(int(part or 0) for part in match.groups()))
            if (config.outputs, config.rows, config.n) in TILES and config.share == 1:
                times[config._replace(matmul=config.n)] = value
    return Shape(*sizes, times, lambda config, costs: e4m3_wgmma.time(config, *sizes, alike, NUM_SMS, costs) / 1e3)


def of_registers(line: dict[str, Any]) -> Shape:
    times, sizes = {}, (line["rows"], line["outputs"], line["inputs"])
    name = line.get("format") or line["what"]
    for key, value in line.get("us", line).items():
        if name in LAYOUTS and (match := OF_REGISTERS.fullmatch(key)):
            times[WgmmaConfig(*(int(part) for part in match.groups() if part))] = value

    def time(config: WgmmaConfig, costs: Costs) -> float:
        return quantized_wgmma.time(config, *sizes, LAYOUTS[name], NUM_SMS, costs) / CYCLES

    return Shape(*sizes, times, time)


def off(shapes: list[Shape], costs: Costs) -> float:
    """How bad these are: what choices lose, and how far times are off, mostly of the nearly fastest configs."""
    total = 0.0
    for shape in shapes:
        reckoned, best = shape.reckoned(costs), min(shape.times.values())
        total += FOUND * shape.lost(reckoned)
        errors = ((math.log(reckoned[config] / t), best / t) for config, t in shape.times.items())
        total += sum(error**2 * weight**4 for error, weight in errors) / sum(
            (best / t) ** 4 for t in shape.times.values()
        )
    return total / len(shapes)


def search(shapes: list[Shape], costs: Costs, most: dict[str, float]) -> Costs:
    """Steps at random from the best ones found, ever smaller. most: of some costs."""

    def limited(costs: Costs) -> Costs:
        return costs._replace(**{name: min(getattr(costs, name), limit) for name, limit in most.items()})

    costs = limited(costs)
    draw, best = random.Random(0), off(shapes, costs)
    for i in range(ROUNDS):
        step = 0.5 * (1 - i / ROUNDS) + 0.02
        tried = limited(costs._make(x * math.exp(draw.gauss(0, step)) if draw.random() < 0.3 else x for x in costs))
        if (now := off(shapes, tried)) < best:
            costs, best = tried, now
    return costs


def report(shapes: list[Shape], costs: Costs) -> None:
    for shape in shapes:
        found = shape.reckoned(costs)
        chosen, fastest = (min(times, key=lambda config: times[config]) for times in (found, shape.times))
        print(f"{shape.rows:5} x {shape.outputs} x {shape.inputs}: {tuple(chosen)} {shape.times[chosen]} us, "
              f"fastest {tuple(fastest)} {shape.times[fastest]}")  # fmt: skip
    lost = [shape.lost(shape.reckoned(costs)) for shape in shapes]
    errors = [math.log(t / shape.times[config]) for shape in shapes for config, t in shape.reckoned(costs).items()]
    apart = math.sqrt(sum(error**2 for error in errors) / len(errors))
    print(
        f"{len(errors)} times are off by {apart:.1%}; choices lose {sum(lost) / len(lost):.1%}, at most {max(lost):.1%}"
    )


def write(module: Any, costs: Costs) -> None:
    source = Path(module.__file__)
    values = "".join(f"    {key}={value:.4g},\n" for key, value in costs._asdict().items())
    text = re.sub(r"(?m)^COSTS = Costs\([^)]*\)", f"COSTS = Costs(\n{values})", source.read_text(), count=1)
    source.write_text(text)
    print(f"{source.name}: COSTS = {costs}")


def fit(path: str) -> None:
    """Writes costs to e4m3_wgmma.py and to quantized_wgmma.py, each if there are times of its configs, and prints
    what choices by them lose. How long a format's weights take to be widened stays as in its layout."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    of: tuple[tuple[Any, Callable[[dict[str, Any]], Shape]], ...] = (
        (e4m3_wgmma, of_e4m3), (quantized_wgmma, of_registers),
    )  # fmt: skip
    for module, read in of:
        if shapes := [shape for shape in map(read, lines) if shape.times]:
            costs = search(shapes, module.COSTS, MOST[module])
            report(shapes, costs)
            write(module, costs)
