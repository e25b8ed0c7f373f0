"""Bytes on each rank for a way of sharing the model out, and the KV cache that the rest holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ....rank import cache_groups, layer_slots
from ....rank.cache_groups import Groups
from .devices import Device
from .shape import KINDS, WIDTHS, ModelShape, StageShape, Weights, split

BLOCK = 16  # tokens; rank/worker/engine.py
# The KV cache's share of what is free after loading, on GPUs less the largest step, by whether it is a CPU;
# rank/worker/kv_cache.py
FRACTION = {True: 0.4, False: 0.95}
SNAPSHOTS, SNAPSHOT_SHARE = 2, 0.25  # of recurrent states, for each sequence, in what they leave; ibid.
BUFFERS = 4 * (96 << 20)  # bytes on the device for experts that are copied; rank/model/experts/streamer.py
UNLIMITED = 1 << 40  # blocks of a stage without keys and values
VERIFIED = 64  # tokens that a step with drafts may sample, prompts' ends apart; rank/worker/engine.py
PER_LOGIT = 51  # bytes of the sampler's sort, probabilities and noise; 1601 MiB for 256 x 128256 on H200


@dataclass(frozen=True, order=True)
class Layout:
    """How ranks share the model: dp replicas of pp pipeline stages of tp ranks; experts shared out over ep of them."""

    tp: int
    pp: int = 1
    dp: int = 1
    ep: int = 1
    offload: int = 0  # experts of a layer on each rank that are in host memory alone; 0: none lies there
    fixed: int = 0  # and that are on the GPU alone, as the host's memory cannot hold all

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Workload:
    """The user's demands on the job."""

    context: int  # tokens of the longest sequence
    concurrency: int  # sequences at once, over all copies
    length: int  # tokens of an average sequence, half-way through
    dtype: str = "bf16"  # that ranks compute in
    kv_fraction: float = 0.0  # 0: the default
    isq: str = "none"  # the format that linears are quantised to
    kv_cache_dtype: str = "auto"
    cpu_offload: int = 0  # bytes of a rank's tables and layers that may be in host memory
    images: int = 0  # of the usual size in each sequence
    speculate: str = "auto"
    draft_model: str = ""
    draft_tensor_parallel_size: int = 0
    num_speculative_tokens: int = 0
    zipf: float = 0.0  # experts in host memory: the i-th most popular is chosen with a weight of i ** -zipf


@dataclass(frozen=True)
class Stage:
    """A rank of one pipeline stage; all ranks of the stage hold as much."""

    layers: int
    weights: dict[str, int]  # bytes on the device, by class
    host: int  # bytes of experts, tables and layers in the host's memory
    rope: int  # bytes of the table of cosines and sines
    kv_token: int  # bytes of one token's keys and values
    state: int = 0  # bytes of what is kept of one sequence as a whole
    slots: int = 0  # bytes on the device that experts and layers in the host's memory are copied to
    parked: int = 0  # of `host`, bytes of tables and layers, which each rank has for itself
    resident: int = 0  # of `weights`, bytes of experts that are in the host's memory as well, and of fixed ones
    parting: int = 0  # bytes that the host needs more while fixed experts are loaded
    windows: dict[int, int] = field(default_factory=dict)  # how many layers keep so many tokens; 0: all
    kv_layer: int = 0  # bytes of one token of each of these layers; 0: they differ
    drafts_kv: int = 0  # of `kv_token`, those of a model that drafts

    def block(self, groups: Groups) -> int:
        """Bytes of a block of the pool, as rank/worker/kv_cache.py's Layout has it."""
        if len(groups) == 1:
            return self.kv_token * BLOCK
        return cache_groups.lanes(groups, self.windows) * self.kv_layer * BLOCK

    def blocks(self, room: float, rows: int, longest: int, groups: Groups) -> int:
        """How many fit into `room` bytes together with the states of so many sequences and snapshots of them, which may
        not take the `longest` blocks of the longest sequence."""
        left = max(0.0, room - rows * self.state)
        if not self.kv_token:
            return UNLIMITED * bool(left)
        block = self.block(groups)
        beside = left - min(left * SNAPSHOT_SHARE, SNAPSHOTS * rows * self.state)
        return int(max(beside, min(left, longest * block)) // block)

    @property
    def loaded(self) -> int:
        """Bytes of weights on the device: what a rank reports when it has loaded."""
        return sum(self.weights.values())


@dataclass(frozen=True)
class MemoryFit:
    """The tokens and sequences that a layout holds; the poorest stage decides."""

    stages: tuple[Stage, ...]
    runtime: float
    kv_capacity: int  # tokens that fit, in one replica
    kv_tokens: int  # that a run takes: no more than its sequences can use
    kv_bytes: int  # of these and of states, on the rank with the most layers
    free: float  # bytes beside the weights, for cache and steps, on the fullest rank
    spare: float  # of these, left for activations
    activations: float  # bytes that the largest step needs beside weights and cache
    problem: str = ""  # why it cannot run
    short: float = 0.0  # bytes that a rank lacks
    blocks: int = 0  # that fit, in one replica
    groups: Groups = cache_groups.ONE_GROUP

    def tokens(self, length: int) -> int:
        """The tokens that fit in sequences of `length` tokens."""
        return cache_groups.capacity(self.groups, BLOCK, self.blocks, length)

    @property
    def heaviest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.loaded)


@dataclass(frozen=True)
class Parked:
    """The tables and layers of a stage whose weights are in host memory, by the choice of rank/layer_slots.py."""

    bytes: int  # of all of them
    copied: int  # of these, the layers', which each step copies
    row: float  # bytes that a step reads of the tables for each token
    slots: int
    weights: tuple[Weights, ...]


def parked(stage: StageShape, most: int) -> Parked:
    """Tables and layers that `most` bytes hold."""
    tables = [one for one in stage.ends if one.row]
    tables = [tables[place] for place in layer_slots.choose_tables([one.bytes for one in tables], most)]
    held = round(sum(one.bytes for one in tables))
    layers = [[one for one in layer.weights if one.moves] for layer in stage.layers]
    sizes = [round(sum(one.bytes * one.copies for one in layer)) for layer in layers]
    chosen = layer_slots.choose(sizes, most - held)
    slots = layer_slots.slots(chosen) * max((sizes[place] for place in chosen), default=0)
    weights = tuple(one for place in chosen for one in layers[place])
    copied = sum(sizes[place] for place in chosen)
    return Parked(held + copied, copied, sum(one.row for one in tables), slots, (*tables, *weights))


def stages(shape: ModelShape, layout: Layout, context: int, cpu_offload: int = 0) -> tuple[Stage, ...]:
    """The model's stages, the first one with the embedding first. context: tokens of the longest sequence. cpu_offload:
    bytes of tables and layers that may be in host memory."""
    made = []
    for number, one in enumerate(shape.stage_shapes(layout.tp, layout.pp, layout.ep), 1):
        draft = shape.draft(layout.tp, layout.ep) if number == layout.pp else None
        layers, own = (one.layers, ()) if draft is None else (one.layers + draft.layers, draft.layers)
        weights, host, resident, largest = dict.fromkeys(KINDS, 0.0), 0.0, 0.0, 0.0
        for part in one.weights:
            if part.expert and layout.offload:
                host += part.host * max(0, part.copies - layout.fixed)
                largest = max(largest, part.host * part.copies)
                resident += part.slot * max(0, part.copies - layout.offload)
            elif not part.shared:
                weights[part.kind] += part.bytes * part.copies
        moved = parked(one, cpu_offload)
        for part in moved.weights:
            weights[part.kind] -= part.bytes * part.copies
        weights["experts"] += resident
        if draft is not None:
            weights["drafts"] = sum(part.bytes * part.copies for part in draft.weights(layout.pp) if not part.shared)
        whole = {kind: round(size) for kind, size in weights.items()}
        kv = sum(layer.kv for layer in layers)
        windows = Counter(cache_groups.effective_window(layer.window, context) for layer in layers if layer.kv)
        each = {layer.kv for layer in layers if layer.kv}
        state = sum(layer.state for layer in layers)
        rope = context * (shape.ranks[layout.tp].rope + (draft.rope if draft is not None else 0))
        slots, held = moved.slots + (BUFFERS if host else 0), round(host) + moved.bytes
        parting = round(largest) if layout.fixed else 0
        made.append(
            Stage(
                len(one.layers),
                whole,
                held,
                rope,
                kv,
                state,
                slots,
                moved.bytes,
                round(resident),
                parting,
                windows,
                each.pop() if len(each) == 1 else 0,
                sum(layer.kv for layer in own),
            )  # fmt: skip
        )
    return tuple(made)


def groups_of(stages: tuple[Stage, ...]) -> Groups:
    """Cache groups, by the rule of rank/worker/kv_cache.py's `layout`."""
    groups = cache_groups.choose_groups([stage.windows for stage in stages], BLOCK)
    alike = all(stage.kv_layer or not stage.kv_token for stage in stages)
    return groups if alike or len(groups) == 1 else cache_groups.ONE_GROUP


def activations(shape: ModelShape, layout: Layout, asked: Workload, budget: int) -> float:
    """Bytes that a step of `budget` tokens needs at its widest: between two linears of a layer, also of a model that
    drafts, or the logits, or what the tower needs for the largest image."""
    inner = max((layer.inner for layer in shape.kinds(layout.tp, layout.ep)), default=0)
    widest, rows = 4 * shape.hidden + inner, split(asked.concurrency, layout.dp)
    if (draft := shape.draft(layout.tp, layout.ep)) is not None:
        inner = max((layer.inner for layer in draft.layers), default=0)
        widest = max(widest, draft.read + 4 * draft.hidden + inner)
    stream = budget * WIDTHS[asked.dtype] * widest
    sampled = rows + max(rows, VERIFIED) * (shape.verified > 1)
    logits = sampled * shape.vocab * PER_LOGIT
    tower = shape.images.largest.stream * WIDTHS[asked.dtype] if shape.images else 0
    return max(stream, logits, tower)


def memory_fit(shape: ModelShape, layout: Layout, asked: Workload, device: Device, budget: int) -> MemoryFit:
    """Memory of weights, libraries and cache on each rank, and what does not fit in `device.memory`."""
    parts = stages(shape, layout, asked.context, 0 if device.cpu else asked.cpu_offload)
    runtime = device.runtime + (device.group if layout.ranks > 1 else 0)
    fraction = asked.kv_fraction or FRACTION[device.cpu]
    needs = activations(shape, layout, asked, budget)
    rows = split(asked.concurrency, layout.dp)
    groups = groups_of(parts)
    longest = cache_groups.held(groups, BLOCK, asked.context, budget)
    most = rows * sum(cache_groups.covering(group, BLOCK, asked.context) for group in groups)  # no more is ever used
    kept = 0.0 if device.cpu else needs  # GPU ranks try the largest step before they size the cache
    free = [device.memory - runtime - stage.loaded - stage.slots - stage.rope - kept for stage in parts]
    blocks = [
        stage.blocks(fraction * max(0.0, left), rows, longest, groups) for stage, left in zip(parts, free, strict=True)
    ]
    fits, count = min(blocks), min(most, *blocks)
    used = [count * stage.block(groups) + rows * stage.state for stage in parts]
    spare = min(left - kv for left, kv in zip(free, used, strict=True)) + kept
    problem, short = "", 0.0
    if min(free) <= 0:
        problem, short = "the weights do not fit", -min(free)
    elif cache_groups.longest(groups, BLOCK, count, budget) < asked.context:
        need = [(longest * stage.block(groups) + rows * stage.state) / fraction for stage in parts]
        short = max(asks - left for asks, left in zip(need, free, strict=True))
        problem = f"not one sequence of {asked.context} tokens fits"
    beside = min(free) + kept
    room, tokens = (cache_groups.capacity(groups, BLOCK, n, asked.context) for n in (fits, count))
    return MemoryFit(parts, runtime, room, tokens, max(used), beside, spare, needs, problem, short, fits, groups)
