"""Fits what e4m3_wgmma.py chooses its cuts by to measured times of all cuts (benchmarks/quantized.py --fit)."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from phalanx.kernels.quantized import e4m3_wgmma
from phalanx.kernels.quantized.e4m3_wgmma import Costs, Cut

NAME = re.compile(r"e(\d+)n(\d+)s(\d+)x(\d+)w(\d+)(?:m(\d+))?")
ROUNDS, NUM_SMS = 1500, 132
FOUND = 3.0  # weight of what a choice loses, beside how far times are off


class Shape(NamedTuple):
    """The times of one GEMM, in us."""

    rows: int
    outputs: int
    inputs: int
    times: dict[Cut, float]

    def reckoned(self, costs: Costs) -> dict[Cut, float]:
        sizes = self.rows, self.outputs, self.inputs
        return {cut: e4m3_wgmma.time(cut, *sizes, NUM_SMS, costs) / 1e3 for cut in self.times}

    def lost(self, reckoned: dict[Cut, float]) -> float:
        """By how much the chosen cut takes longer than the fastest."""
        return self.times[min(reckoned, key=lambda cut: reckoned[cut])] / min(self.times.values()) - 1


def read(path: str) -> Iterator[Shape]:
    for line in Path(path).read_text().splitlines():
        one = json.loads(line)
        times = {}
        for key, value in one.items():
            if match := NAME.fullmatch(key):
                cut = Cut(*(int(part or 0) for part in match.groups()))
                times[cut._replace(matmul=cut.n)] = value
        if times:
            yield Shape(one["rows"], one["outputs"], one["inputs"], times)


def off(shapes: list[Shape], costs: Costs) -> float:
    """How bad these are: what choices lose, and how far times are off, mostly of cuts that are nearly the fastest."""
    total = 0.0
    for shape in shapes:
        reckoned, best = shape.reckoned(costs), min(shape.times.values())
        total += FOUND * shape.lost(reckoned)
        errors = ((math.log(reckoned[cut] / t), best / t) for cut, t in shape.times.items())
        total += sum(error**2 * weight**4 for error, weight in errors) / sum(
            (best / t) ** 4 for t in shape.times.values()
        )
    return total / len(shapes)


def search(shapes: list[Shape], costs: Costs) -> Costs:
    """Steps at random from the best ones found, ever smaller."""
    draw, best = random.Random(0), off(shapes, costs)
    for i in range(ROUNDS):
        step = 0.5 * (1 - i / ROUNDS) + 0.02
        tried = Costs(*(x * math.exp(draw.gauss(0, step)) if draw.random() < 0.3 else x for x in costs))
        tried = tried._replace(together=min(tried.together, 8))
        if (now := off(shapes, tried)) < best:
            costs, best = tried, now
    return costs


def fit(path: str) -> None:
    """Writes the costs to e4m3_wgmma.py, and which tiles have no times, and says what choices lose."""
    shapes = list(read(path))
    costs = search(shapes, e4m3_wgmma.COSTS)
    for shape in shapes:
        found = shape.reckoned(costs)
        chosen, fastest = (min(times, key=lambda cut: times[cut]) for times in (found, shape.times))
        print(f"{shape.rows:5} x {shape.outputs} x {shape.inputs}: {tuple(chosen)} {shape.times[chosen]} us, "
              f"fastest {tuple(fastest)} {shape.times[fastest]}")  # fmt: skip
    lost = [shape.lost(shape.reckoned(costs)) for shape in shapes]
    print(f"choices lose {sum(lost) / len(lost):.1%}, at most {max(lost):.1%}")
    measured = {(cut.outputs, cut.rows, cut.n) for shape in shapes for cut in shape.times}
    left = [tile for tile, _ in e4m3_wgmma.CUTS if tile not in measured]
    source = Path(e4m3_wgmma.__file__)
    values = "".join(f"    {name}={value:.4g},\n" for name, value in costs._asdict().items())
    text = re.sub(r"(?m)^COSTS = Costs\([^)]*\)", f"COSTS = Costs(\n{values})", source.read_text(), count=1)
    source.write_text(re.sub(r"(?m)^UNMEASURED: (.*) = .*", rf"UNMEASURED: \1 = {tuple(left)}", text, count=1))
    print(f"{source.name}: {costs}, without times {left}")
