"""Decode and prefill with experts in host memory: tokens/s, and how experts were served.

    python benchmarks/offload.py --offload 0,64,128
    python benchmarks/offload.py --offload 64,128 --isq q4km
    python benchmarks/offload.py --offload 64 --zipf 0.8 --placement cpu
    python benchmarks/offload.py qwen3-235b-a22b --isq q4km --offload 0     # what does not fit goes to the host
    python benchmarks/offload.py DIR --offload 8 --device cpu     # the shape of DIR's config.json
    python benchmarks/offload.py --offload 64,128 --isq q4km --prefill 1x4096 --batches 1 --timeline

Weights are random, of Qwen3-30B-A3B unless another shape or a directory is named. A router with random weights chooses
experts nearly evenly, which is the worst case. `--zipf S` has them drawn instead: in each layer the i-th most popular
of them with a weight of i ** -S, in an order of its own. 0.8 is taken for the skew of real text, with which it has not
been compared. The cache of resident experts follows what is chosen within some hundred steps: --warm 400 has it do so
before the steps that are measured. Each number in --offload is a job.

With --timeline a prompt of each kind runs once more, under torch's profiler: how long the GPU copies, runs kernels,
does both or neither (timeline.py), and `launch`, how long the host launches; all in milliseconds. Decode steps of each
batch run some more so, too: what the GPU does in two layers in the middle of one, from one layer's choice of experts to
the next one's, in microseconds (timeline.py describes the columns).

Below the speeds stands what the host does for a layer of experts in a decode step, in microseconds (means). Of up to 16
sequences a thread of its own does it:
    wait    until the layer's tokens and choices have come from the GPU: its work before them, and the way
    choose  which experts the CPU computes, and which are copied
    cpu     until the CPU has computed its experts
    rest    of the step, for a layer: until the step's first layer begins; the step is a median, the others are means
Of more, in the thread that launches as well:
    launch  of copies and of the GPU's work on copied experts
    other   of the host's part, such as the experts that change places
    graphs  launches of captured segments
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from phalanx.benchmarks import step, timeline
from phalanx.benchmarks.shapes import CONFIGS
from phalanx.kernels.moe import host_service
from phalanx.kernels.moe.host_service import Service
from phalanx.rank.model.base import Model
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.experts.host import HostExperts
from phalanx.rank.model.experts.host_buffers import HostView
from phalanx.rank.model.experts.streamer import Streamer
from phalanx.rank.model.layers.moe import Router
from phalanx.rank.options import Options
from phalanx.rank.scheduler.replica import Replica
from torch import Tensor

ZIPF = "PHALANX_BENCH_ZIPF"  # the exponent, for the ranks
TIMELINE = "PHALANX_BENCH_TIMELINE"  # set: as --timeline, for the ranks
PROFILED = 6  # decode steps beside torch's profiler
DRAWS = 1 << 13  # choices of a layer, which are used in turn
IN_HOST = "wait", "choose", "launch", "cpu"
PARTS = *IN_HOST, "graphs"
SERVED = "resident", "on_cpu", "copied"  # experts


budget: Budget | None = None  # of this process, where it is a rank


class Budget:
    """The host's work for a layer of experts: seconds by name, a row for each time that a layer's part is done."""

    def __init__(self) -> None:
        self.rows: list[defaultdict[str, float]] = [defaultdict(float)]
        for name, owner, attribute in (
            ("begin", HostExperts, "_from_host"),
            ("wait", HostView, "wait"),
            ("choose", HostExperts, "_choose"),
            ("launch", HostExperts, "_on_device"),
            ("launch", Streamer, "_launch"),
            ("cpu", HostExperts, "_by_cpu"),
            ("graphs", torch.cuda.CUDAGraph, "replay"),
        ):
            self._wrap(name, owner, attribute)
        count = HostExperts._count

        def counted(layer: HostExperts, *numbers: int) -> None:
            for name, number in zip(SERVED, numbers, strict=True):
                self.rows[-1][name] += number
            count(layer, *numbers)

        HostExperts._count = counted  # type: ignore[assignment, method-assign]
        self.served: list[list[int]] = []  # by captured steps of few tokens: a service's totals as each was posted
        post = Service.post

        def posted(service: Service, one: host_service.Step) -> None:
            self.served.append(service.totals.tolist())
            post(service, one)

        Service.post = posted  # type: ignore[assignment, method-assign]

    def _wrap(self, name: str, owner: Any, attribute: str) -> None:
        call: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "begin":
                self.rows.append(defaultdict(float))
            started, row = time.perf_counter(), self.rows[-1]
            made = call(*args, **kwargs)
            row[name] += time.perf_counter() - started
            return made

        setattr(owner, attribute, timed)

    def of_service(self, steps: int, layers: int, seconds: float) -> dict[str, float]:
        """Means of the last small-batch steps, as `means`."""
        first, last = self.served[-steps - 1], self.served[-1]
        each = [(b - a) / (steps * layers) for a, b in zip(first, last, strict=True)]
        times = len(host_service.TIMES)
        found = {name: 1e-3 * one for name, one in zip(host_service.TIMES, each[:times], strict=True)}
        found["rest"] = 1e6 * seconds - sum(found.values())
        found |= dict(zip((*SERVED, "loaded"), each[times:], strict=True))
        return {name: round(one, 2) for name, one in found.items()}

    def means(self, count: int, seconds: float) -> dict[str, float]:
        """Means of the last `count` rows: microseconds of each part of what takes `seconds` a layer, and experts."""
        rows = self.rows[-count:]
        found = {name: sum(row[name] for row in rows) / len(rows) for name in (*PARTS, "begin", "end", *SERVED)}
        found["other"] = found.pop("begin") + found.pop("end") - sum(found[name] for name in IN_HOST)
        found["rest"] = seconds - sum(found[name] for name in (*PARTS, "other"))
        return {name: round(one if name in SERVED else 1e6 * one, 2) for name, one in found.items()}


class OffloadBench(step.Bench):
    """Says as well what a layer of a decode step takes."""

    layers = 0  # whose experts are in host memory
    all_layers = 0  # that have experts
    prompts = 0  # that were measured

    def run(self, sequences: int, tokens: int, new: int) -> float:
        seconds = super().run(sequences, tokens, new)
        self.prompts += new == 1
        if TIMELINE in os.environ and new == 1 and self.prompts % step.PROMPT_RUNS == 0:  # the last of a kind
            spans = timeline.profiled(lambda: super(OffloadBench, self).run(sequences, tokens, 1))
            launch = round(1e3 * self.clock.taken["launch"][-1], 2)
            step.say(what="timeline", batch=sequences, prompt=tokens, launch=launch, **timeline.summary(spans))
        return seconds

    def decode(self, batch: int, prompt: int, steps: int) -> dict[str, Any]:
        served = len(budget.served) if budget is not None else 0
        line = super().decode(batch, prompt, steps)
        seconds, layers = 1e-3 * line["ms_per_step"] / max(1, self.layers), self.layers
        if budget is not None and len(budget.served) > served + steps:
            line["budget"] = budget.of_service(steps, layers, seconds)
        elif budget is not None and len(budget.rows) > 1:
            line["budget"] = budget.means(steps * layers, seconds)
        if TIMELINE in os.environ:
            spans = timeline.profiled(lambda: super(OffloadBench, self).run(batch, prompt, PROFILED))
            line["layers"] = timeline.middle(spans, self.all_layers)
        return line


class OffloadRank(step.BenchRank):
    bench = OffloadBench

    def run_scheduler(self, replicas: list[Replica], model: Model) -> int:
        OffloadBench.all_layers = sum(isinstance(one, FusedExperts) for one in model.modules())
        if model.offload is not None:
            OffloadBench.layers = len(model.offload.layers)
        code = super().run_scheduler(replicas, model)
        if model.offload is not None:
            step.say(what="experts", **vars(model.offload.counters))
        return code


def draw(exponent: float, experts: int, k: int, seed: int) -> Tensor:
    """[DRAWS, k] int32: k different experts each, by the Gumbel trick."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(experts, generator=generator)
    scores = -exponent * torch.arange(1, experts + 1).log()
    noise = -(-torch.rand(DRAWS, experts, generator=generator).log()).log()
    return order[(scores + noise).topk(k).indices].int()


def route_by_zipf(exponent: float) -> None:
    """Replace every router's choice. What it needs lies on the device, so that steps are captured with it; a layer has
    one kernel for it, as its router has."""
    routers: list[Any] = []
    rows = torch.empty(0)  # of what is drawn, for the step's tokens
    even = torch.empty(0)  # weights of a step's tokens

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal rows, even
        count, k = len(x), self.params.top_k
        if self not in routers:
            routers.append(self)
            self.drawn = draw(exponent, len(self.weight), k, len(routers)).to(x.device)
            self.turn = torch.zeros(1, dtype=torch.int64, device=x.device)
        if self is routers[0]:
            rows = (torch.arange(count, device=x.device) + self.turn) % DRAWS  # a step may have more than DRAWS tokens
            self.turn += count
            if count > len(even):  # first by the largest step, which is not captured
                even = x.new_full((count, k), 1 / k, dtype=torch.float32)
        return self.drawn.index_select(0, rows[:count]), even[:count]  # the last layer may have fewer rows

    Router.forward = forward  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-30b-a3b", help="a shape, or a directory with a config.json")
    parser.add_argument("--offload", default="0,64,128", help="experts of a layer in host memory alone: N,..; 0: none")
    parser.add_argument("--placement", default="auto", choices=("auto", "cpu", "stream"))
    parser.add_argument("--zipf", type=float, help="exponent of the experts' popularity")
    parser.add_argument("--deferral", action="store_true", help="with --expert-deferral")
    parser.add_argument("--isq", default="none", help="what linears and experts are quantised to, such as q4km")
    parser.add_argument("--np", type=int, default=1, help="ranks")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--batches", default="1,16", help="sequences that decode together")
    parser.add_argument("--prompt", type=int, default=128, help="their prompts' tokens")
    parser.add_argument("--steps", type=int, default=64, help="decode steps to take the median of")
    parser.add_argument("--warm", type=int, default=0, help="decode steps of each batch before those")
    parser.add_argument("--prefill", type=step.pairs, default=[(1, 8192)], help="SEQUENCESxTOKENS,..")
    parser.add_argument("--timeline", action="store_true", help="what a GPU does in prompts and layers of decode")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    if asked.zipf is not None:
        os.environ[ZIPF] = str(asked.zipf)
    if asked.timeline and (asked.device == "cpu" or not torch.cuda.is_available()):
        parser.error("--timeline is of a GPU")
    if asked.timeline:
        os.environ[TIMELINE] = "1"
    batches = [int(b) for b in asked.batches.split(",")]
    ask = step.Ask(batches, asked.prompt, asked.steps, asked.prefill, asked.warm)
    with tempfile.TemporaryDirectory() as made:
        if asked.model in CONFIGS:
            Path(made, "config.json").write_text(json.dumps(CONFIGS[asked.model]))
        for out in map(int, asked.offload.split(",")):
            options = Options(
                model=made if asked.model in CONFIGS else asked.model,
                ranks=asked.np,
                device=asked.device,
                load_format="dummy",
                prefix_cache=False,
                speculate="none",
                max_num_seqs=max(batches),
                num_experts_offload_per_rank=out,
                isq=asked.isq,
                expert_placement=asked.placement if out else "auto",
                expert_deferral=asked.deferral,
                timeout=600.0,
            )
            lines = step.start(options, ask, __file__)
            deferral = ", deferral" if asked.deferral else ""
            print(f"\n{out} experts of a layer in host memory alone, {asked.placement}{deferral}, zipf {asked.zipf}")
            print(step.table(lines))
            for line in lines:
                if "budget" in line:
                    print(f"batch {line['batch']}, a layer:", *(f"{name} {us}" for name, us in line["budget"].items()))
            for line in lines:
                for rows in line.get("layers", []):
                    print(timeline.HEADING, *(timeline.Row(*row) for row in rows), sep="\n")
            print(*(line for line in lines if line["what"] in ("experts", "timeline")), sep="\n")
            if asked.json:
                about = dict(offload=out, isq=asked.isq, placement=asked.placement, zipf=asked.zipf, np=asked.np)
                about["deferral"] = asked.deferral
                with open(asked.json, "a") as file:
                    file.writelines(json.dumps(about | line) + "\n" for line in lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        if ZIPF in os.environ:
            route_by_zipf(float(os.environ[ZIPF]))
        budget = Budget()
        step.become_rank(OffloadRank)
    main()
