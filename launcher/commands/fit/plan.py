"""Every sensible way to share a model over the ranks, what each holds and how fast it is, and the best of them."""

from __future__ import annotations

import bisect
import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from .devices import GIB, Device
from .memory import Layout, MemoryFit, Workload, memory_fit
from .shape import ModelShape, split
from .speed import Speed, predict

BUDGET = {True: 512, False: 8192}  # tokens of a step, by whether it is a CPU; rank/worker/engine.py
SPARED = 0.15  # of a GPU, for cache and steps beside resident experts; rank/model/experts/offload.py
HOST_SPARED = 0.05  # of a host, for all else, where it cannot hold all experts; ibid.


@dataclass(frozen=True)
class Cluster:
    nodes: int
    per_node: int  # ranks, one per device
    device: Device
    network: float  # bytes/s of a node to the others
    host_memory: float = 0.0  # bytes of a node; 0: unknown

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class LayoutEstimate:
    layout: Layout
    memory: MemoryFit
    speed: Speed
    together: int  # sequences of the full context that the caches hold at once, over all copies
    verdict: str  # "" when everything asked for fits
    runs: bool
    unserved: str  # "" when Phalanx runs this layout today; else what is missing
    even: float = 0.0  # tokens/s with experts in host memory if all are chosen evenly


@dataclass(frozen=True)
class Answer:
    """The whole report of `phalanx fit`."""

    shape: ModelShape
    cluster: Cluster
    asked: Workload
    checkpoint: str  # what the weight files hold beside what the model needs
    figures: list[LayoutEstimate]
    best: LayoutEstimate | None
    smallest: Layout | None  # the fewest ranks that hold it
    command: list[str]


def layouts(shape: ModelShape, cluster: Cluster, tp: int = 0, pp: int = 0, dp: int = 0, ep: int = 0) -> list[Layout]:
    """All that use every rank: tensor groups inside a node unless --tp is given, whole key heads per rank.

    Experts are cut, or whole over a tensor group or over all copies, unless ep is given."""
    found = []
    for t in shape.ranks:
        if (t != tp) if tp else (cluster.per_node % t != 0):
            continue
        if cluster.ranks % t:
            continue
        for p in range(1, min(cluster.ranks // t, len(shape.stages)) + 1):
            if (cluster.ranks // t) % p or (pp and p != pp):
                continue
            d = cluster.ranks // t // p
            if dp and d != dp:
                continue
            found += _placements(shape.experts, t, p, d, ep)
    return found


def _placements(experts: int, tp: int, pp: int, dp: int, ep: int) -> list[Layout]:
    """The ways to share experts out. ep: only this degree, of those that divide tp or span copies."""
    degrees = {1} | ({tp, tp * dp} if experts > 1 else set())
    if ep:
        degrees = {ep} if ep in degrees or (experts > 1 and tp % ep == 0) else set()
    return [Layout(tp, pp, dp, ep=degree) for degree in sorted(degrees) if degree <= experts]


def estimates(
    shape: ModelShape, possible: list[Layout], cluster: Cluster, asked: Workload, offload: int = 0
) -> list[LayoutEstimate]:
    """Plans for each layout; one that does not fit is followed by one with as few experts in host memory as it takes.

    offload: so many instead, in all layouts."""
    found = []
    for one in possible:
        movable = shape.experts > 1 and one.ep <= one.tp and not cluster.device.cpu
        plain = None if offload else estimate(shape, one, cluster, asked)
        if plain is not None:
            found.append(plain)
        if movable and (plain is None or plain.memory.problem):
            most = split(shape.experts, one.ep)
            count = min(offload, most) or fewest_in_host(shape, one, cluster, asked)
            split_up = dataclasses.replace(one, offload=count)
            fixed = fewest_fixed(shape, split_up, cluster, asked, most)
            found.append(estimate(shape, dataclasses.replace(split_up, fixed=fixed), cluster, asked))
    return found


def fewest_in_host(shape: ModelShape, layout: Layout, cluster: Cluster, asked: Workload) -> int:
    """Experts of a layer that each rank has in host memory alone: the fewest with which everything asked for fits, else
    with which one sequence fits and as much is left of the GPU as serving leaves; all where neither is possible."""
    most, device = split(shape.experts, layout.ep), cluster.device

    def held(count: int) -> MemoryFit:
        one = dataclasses.replace(layout, offload=count)
        return memory_fit(shape, one, asked, device, _budget(one, cluster, asked))

    def everything(count: int) -> bool:
        fit = held(count)
        return not fit.problem and _together(fit, layout, asked) >= asked.concurrency

    def spared(count: int) -> bool:
        fit = held(count)
        return not fit.problem and fit.free >= SPARED * (device.memory - fit.runtime)

    counts = range(1, most + 1)
    return next((count for fits in (everything, spared) if (count := _first(counts, fits))), most)


def fewest_fixed(shape: ModelShape, layout: Layout, cluster: Cluster, asked: Workload, most: int) -> int:
    """Experts of a layer that each rank has on the GPU alone, of those that are there, as the host's memory cannot hold
    all: the fewest with which it holds the others. most: experts of a layer on a rank."""

    def lacks(fixed: int) -> float:
        one = dataclasses.replace(layout, fixed=fixed)
        return _host_lacks(memory_fit(shape, one, asked, cluster.device, _budget(one, cluster, asked)), one, cluster)

    counts = range(1, min(most - layout.offload, most - 1) + 1)
    return _first(counts, lambda fixed: not lacks(fixed)) if lacks(0) else 0


def _first(counts: range, fits: Callable[[int], bool]) -> int:
    """The first that fits, as all after it do; 0: none."""
    at = bisect.bisect_left(counts, True, key=fits)
    return counts[at] if at < len(counts) else 0


def _budget(layout: Layout, cluster: Cluster, asked: Workload) -> int:
    """Tokens of a step."""
    rows = split(asked.concurrency, layout.dp)
    return max(BUDGET[cluster.device.cpu], asked.concurrency) + (rows if layout.offload else 0)


def _together(held: MemoryFit, layout: Layout, asked: Workload) -> int:
    return held.kv_capacity // max(1, asked.context) * layout.dp


def estimate(shape: ModelShape, layout: Layout, cluster: Cluster, asked: Workload) -> LayoutEstimate:
    budget = _budget(layout, cluster, asked)
    held = memory_fit(shape, layout, asked, cluster.device, budget)
    together = _together(held, layout, asked)
    running = min(asked.concurrency, max(1, held.tokens(asked.length) * layout.dp // asked.length))

    def at(zipf: float) -> Speed:
        routed = dataclasses.replace(asked, zipf=zipf)
        return predict(shape, layout, cluster.device, routed, running, budget, cluster.per_node, cluster.network)

    speed = at(asked.zipf)
    even = at(0.0).tokens_per_s if layout.offload else 0.0
    lacks = _host_lacks(held, layout, cluster)
    verdict = _verdict(held, asked, lacks, together)
    runs = not held.problem and not lacks
    return LayoutEstimate(layout, held, speed, together, verdict, runs, _lacking(layout), even)


def _host_lacks(held: MemoryFit, layout: Layout, cluster: Cluster) -> float:
    """Bytes that a host lacks for the experts, once for all its replicas, and for the layers that it is to hold."""
    here = min(layout.ranks, cluster.per_node)
    experts = max(stage.host - stage.parked for stage in held.stages) * min(layout.tp * layout.pp, here)
    host = experts + max(stage.parked + stage.parting for stage in held.stages) * here
    room = cluster.host_memory * (1 - HOST_SPARED if layout.fixed else 1)
    return max(0.0, host - room) if cluster.host_memory else 0.0


def _verdict(held: MemoryFit, asked: Workload, lacks: float, together: int) -> str:
    if held.problem:
        return f"{held.problem}: {held.short / 1e9:.1f} GB too little on a rank"
    if lacks:
        what = "weights in host memory do" if asked.cpu_offload else "experts do"
        return f"the {what} not fit: {lacks / 1e9:.1f} GB too little on a host"
    if together < asked.concurrency:
        return f"{together} of {asked.concurrency} sequences at once at full length"
    return ""


def _lacking(layout: Layout) -> str:
    """Reasons why Phalanx cannot run a layout yet."""
    return "ep over several replicas is not served yet" if layout.ep > layout.tp else ""


def best(figures: list[LayoutEstimate]) -> LayoutEstimate | None:
    """The best plan that runs: for the most sequences, then the fastest; served ones first, offload last."""
    return max((one for one in figures if one.runs), key=_merit, default=None)


def _merit(one: LayoutEstimate) -> tuple[bool, bool, bool, float]:
    return not one.unserved, not one.layout.offload, not one.verdict, one.speed.tokens_per_s


def fewest(shape: ModelShape, cluster: Cluster, asked: Workload, most: int = 1024) -> Layout | None:
    """The fewest ranks of this device that hold the weights and one sequence of the asked length."""
    for ranks in range(1, most + 1):
        per_node = min(ranks, cluster.per_node)
        if ranks % per_node:
            continue
        smaller = Cluster(ranks // per_node, per_node, cluster.device, cluster.network)
        for layout in (one for one in layouts(shape, smaller) if one.dp == 1):
            if not memory_fit(shape, layout, asked, cluster.device, BUDGET[cluster.device.cpu]).problem:
                return layout
    return None


def command(
    model: str, one: LayoutEstimate, cluster: Cluster, asked: Workload, dtype: str = "auto", mmproj: str = ""
) -> list[str]:
    """The lines that start it. dtype, mmproj: as they were asked for."""
    layout = one.layout
    words = ["--model", model, *(["--mmproj", mmproj] if mmproj else [])]
    if cluster.device.cpu:
        words += ["--device", "cpu"]
    else:
        words += ["--d", ",".join(str(i) for i in range(cluster.per_node))]
    words += ["--tp", str(layout.tp), "--pp", str(layout.pp)]
    words += ["--dp", str(layout.dp)] if layout.dp > 1 else []
    words += ["--ep", str(layout.ep)] if layout.ep > 1 else []
    words += ["--num-experts-offload-per-rank", str(layout.offload)] if layout.offload else []
    words += ["--max-model-len", str(asked.context), "--max-num-seqs", str(-(-asked.concurrency // layout.dp))]
    words += ["--images-per-prompt", str(asked.images)] if asked.images else []
    words += ["--dtype", dtype] if dtype != "auto" else []
    if asked.isq != "none":
        words += ["--isq", asked.isq]
    if asked.kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", asked.kv_cache_dtype]
    words += ["--speculate", asked.speculate] if asked.speculate != "auto" else []
    words += ["--draft-model", asked.draft_model] if asked.draft_model else []
    if asked.draft_tensor_parallel_size:
        words += ["--draft-tensor-parallel-size", str(asked.draft_tensor_parallel_size)]
    if asked.num_speculative_tokens:
        words += ["--num-speculative-tokens", str(asked.num_speculative_tokens)]
    if asked.cpu_offload and not cluster.device.cpu:
        words += ["--cpu-offload-gb", f"{asked.cpu_offload / GIB:g}"]
    if asked.kv_fraction:
        words += ["--kv-fraction", f"{asked.kv_fraction:g}"]
    serve = "phalanx serve " + shlex.join(words)
    if cluster.nodes == 1:
        return [f"{serve} --np {cluster.ranks}" if cluster.device.cpu else serve]
    return [
        f"phalanx hostfile --slots {cluster.per_node} --mpi openmpi -o hosts",
        f"mpirun -np {cluster.ranks} -hostfile hosts --bind-to none --map-by slot {serve}",
        f"srun --mpi=pmix --nodes={cluster.nodes} --ntasks-per-node={cluster.per_node} {serve}",
    ]
