"""Bytes on each rank for a way of sharing the model out, and the KV cache that the rest holds."""

from __future__ import annotations

from dataclasses import dataclass

from .devices import Device
from .shape import KINDS, WIDTHS, ModelShape, Part, split, stage_layers

BLOCK = 16  # tokens; rank/__main__.py
# The KV cache's share of what is free after loading, on GPUs less the largest step, by whether it is a CPU;
# rank/worker/kv_cache.py
FRACTION = {True: 0.4, False: 0.95}
PER_LOGIT = 51  # bytes of the sampler's sort, probabilities and noise; 1601 MiB for 256 x 128256 on H200
PACK_FROM = 1 << 16  # elements from which a CPU keeps an f32 matrix packed; kernels/gemm/linear.py


@dataclass(frozen=True, order=True)
class Layout:
    """How ranks share the model: dp copies of pp stages of tp ranks; experts whole over ep ranks, or cut (ep 1)."""

    tp: int
    pp: int = 1
    dp: int = 1
    ep: int = 1
    offload: bool = False  # the experts are in the host's memory

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Workload:
    """What the user wants of the job."""

    context: int  # tokens of the longest sequence
    concurrency: int  # sequences at once, over all copies
    length: int  # tokens of an average sequence, half-way through
    dtype: str = "bf16"  # that ranks compute in
    kv_fraction: float = 0.0  # 0: the default


@dataclass(frozen=True)
class Stage:
    """A rank of one pipeline stage; all ranks of the stage hold as much."""

    layers: int
    weights: dict[str, int]  # bytes on the device, by class
    host: int  # bytes of experts in the host's memory
    rope: int  # bytes of the table of cosines and sines
    kv_token: int  # bytes of one token's keys and values

    @property
    def loaded(self) -> int:
        """Bytes of weights on the device: what a rank reports when it has loaded."""
        return sum(self.weights.values())


@dataclass(frozen=True)
class MemoryFit:
    """What a layout holds; the poorest stage decides."""

    stages: tuple[Stage, ...]
    runtime: float
    kv_room: int  # tokens that fit, in one copy of the model
    kv_tokens: int  # that a run takes: no more than its sequences can use
    kv_bytes: int  # of these, on the rank with the most layers
    spare: float  # bytes left for activations on the fullest rank
    activations: float  # bytes that the largest step needs beside weights and cache
    problem: str = ""  # why it cannot run
    short: float = 0.0  # bytes that a rank lacks

    @property
    def heaviest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.loaded)


def stages(shape: ModelShape, layout: Layout, asked: Workload, packs: bool = False) -> tuple[Stage, ...]:
    """The model's stages, the first one with the embedding first. packs: large f32 matrices are kept packed."""
    width = WIDTHS[asked.dtype]

    def size(part: Part) -> int:
        narrow = shape.narrow if part.packs and shape.narrow else width
        return round(part.held(layout.tp, layout.ep) * narrow)

    packs = packs and asked.dtype == "f32" and shape.head.one(layout.tp) >= PACK_FROM
    made = []
    for number in range(layout.pp):
        weights, host = dict.fromkeys(KINDS, 0), 0
        mine = stage_layers(len(shape.layers), number, layout.pp)
        for index in mine:
            for part in shape.layers[index]:
                if part.expert and layout.offload:
                    host += size(part)
                else:
                    weights[part.kind] += size(part)
        first, last = number == 0, number == layout.pp - 1
        if first:
            weights["embedding"] = size(shape.embedding)
        if last:
            weights["norms"] += size(shape.norm)
            # A tied head is the embedding itself, except where it stands on another rank or in another form.
            weights["head"] = 0 if shape.tied and first and not packs else size(shape.head)
        kv = len(mine) * shape.kv_elements(layout.tp) * width
        made.append(Stage(len(mine), weights, host, asked.context * shape.rope_width * 4, kv))
    return tuple(made)


def activations(shape: ModelShape, layout: Layout, asked: Workload, budget: int) -> float:
    """Bytes that a step of `budget` tokens needs at its widest: the feed-forward layer, or the logits."""
    width = WIDTHS[asked.dtype]
    inner = max(
        (part.outputs * min(part.copies, shape.chosen or 1) for layer in shape.layers for part in layer
         if part.kind in ("MLP", "experts") and part.cut == "columns"),
        default=shape.hidden,
    )  # fmt: skip
    stream = budget * width * (4 * shape.hidden + 3 * split(inner, layout.tp))
    logits = split(asked.concurrency, layout.dp) * shape.vocab * PER_LOGIT
    return max(stream, logits)


def memory_fit(shape: ModelShape, layout: Layout, asked: Workload, device: Device, budget: int) -> MemoryFit:
    """What of `device.memory` weights, libraries and cache take on each rank, and what does not fit."""
    parts = stages(shape, layout, asked, device.packs)
    runtime = device.runtime + (device.group if layout.ranks > 1 else 0)
    fraction = asked.kv_fraction or FRACTION[device.cpu]
    needs = activations(shape, layout, asked, budget)
    most = split(asked.concurrency, layout.dp) * split(asked.context, BLOCK)  # no more is ever used
    kept = 0.0 if device.cpu else needs  # GPU ranks try the largest step before they size the cache
    free = [device.memory - runtime - stage.loaded - stage.rope - kept for stage in parts]
    blocks = [
        int(fraction * max(0.0, left) // (stage.kv_token * BLOCK)) for stage, left in zip(parts, free, strict=True)
    ]
    fits, count = min(blocks), min(most, *blocks)
    used = [count * BLOCK * stage.kv_token for stage in parts]
    spare = min(left - kv for left, kv in zip(free, used, strict=True)) + kept
    problem, short = "", 0.0
    if min(free) <= 0:
        problem, short = "the weights do not fit", -min(free)
    elif count * BLOCK < asked.context:
        wanted = split(asked.context, BLOCK) * BLOCK
        short = max(wanted * stage.kv_token / fraction - left for stage, left in zip(parts, free, strict=True))
        problem = f"not one sequence of {asked.context} tokens fits"
    return MemoryFit(parts, runtime, fits * BLOCK, count * BLOCK, max(used), spare, needs, problem, short)
