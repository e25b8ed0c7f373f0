"""How fast a layout decodes and computes prompts: a roofline of memory, arithmetic and links, plus kernels' own time.

A GEMM with weights takes the longer of reading them and computing with them, rounded where the two meet (a norm of
order 3 of both, which follows cuBLAS on H200 within 8 % from 1 to 256 rows), plus the device's ramp. Phalanx's own
steps of Llama 8B on H200, and vLLM's of 8B and 70B, are within 20 % of this sum at batches 1 to 256;
tests/launcher/commands/fit/test_speed.py has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import offload
from .devices import Device, host
from .memory import Layout, Workload, parked
from .shape import WIDTHS, Image, Layer, ModelShape, StageShape, Weights, split

ROUND = 3  # order of the norm that joins memory's time and arithmetic's
CACHED = 0.7  # of the memory bandwidth that attention over a paged cache reaches
SCORES = 0.6  # of a large GEMM's FLOP/s that attention over a prompt reaches
GROUPED = 0.6  # of a large GEMM's FLOP/s that the experts' many small ones reach together
CODES = 0.75  # of the memory bandwidth that GPUs' linears of less than 8 bits a weight reach; experts reach all
PAIRS = 96  # of a token and an expert, for each expert, up to which codes are multiplied; kernels/moe/moe.py
# With more routed tokens per expert, and with as many rows of a linear, FP8 is multiplied in 8 bits on Hopper
FP8_PAIRS, FP8_ROWS = 4, 33  # kernels/moe/moe.py; kernels/quantized/e4m3_wgmma.py
# The share of the memory bandwidth that dequantising reaches: the time of a prompt on quantised experts, less its time
# in bf16
MADE_PLAIN = 0.4
SMALL_OPS = 5  # kernels of a layer beside its GEMMs: two norms, rope, attention, activation
HOP = 20e-6  # seconds of a message between nodes


@dataclass(frozen=True)
class Links:
    """The link that carries a group's tensors."""

    tensor: float  # bytes/s of an all-reduce in the tensor group, as bus bandwidth
    stage: float  # bytes/s from one stage to the next
    expert: float  # bytes/s from one rank to the others of its expert group
    latency: float  # seconds of a small all-reduce
    scatter: float  # seconds of a small exchange in the expert group
    hop: float  # seconds of a message between pipeline stages


@dataclass(frozen=True)
class Speed:
    decode_ms: float  # a step: one token for each running sequence
    tokens_per_s: float  # of all sequences together
    prefill_per_s: float  # prompt tokens per second, nothing else running
    running: int  # sequences that it was computed for
    image_ms: float = 0.0  # the tower's work on an image of the usual size


def links(layout: Layout, device: Device, per_node: int, network: float) -> Links:
    """`network` is bytes/s of one node to the others, shared by its ranks."""
    across = layout.tp > per_node
    share = network / per_node
    leaves = layout.tp * layout.pp > per_node
    return Links(
        tensor=share if across else device.link,
        stage=share * min(layout.tp, per_node) if leaves else device.link,
        expert=share if layout.ep > per_node else device.link,
        latency=device.latency + (2 * HOP if across else 0.0),
        scatter=device.latency + (HOP if layout.ep > per_node else 0.0),
        hop=HOP if leaves else device.latency,
    )


class StepModel:
    """The time of one stage of a layout for a step."""

    def __init__(self, shape: ModelShape, layout: Layout, device: Device, links: Links, asked: Workload):
        self.shape, self.layout, self.device, self.links = shape, layout, device, links
        self.width = WIDTHS[asked.dtype]
        self.flops = device.flops_f32 if asked.dtype == "f32" else device.flops
        self.fp8 = 1.0 if asked.dtype == "f32" else device.fp8
        self.host = device.host or host(None, 1)
        self.zipf = asked.zipf
        self.cpu_offload = 0 if device.cpu else asked.cpu_offload

    def step(self, stage: StageShape, tokens: int, context: float, sampled: int) -> float:
        """Seconds of one stage for `tokens` rows whose attention reads `context` cached tokens altogether."""
        kinds: dict[Layer, int] = {}
        for layer in stage.layers:
            kinds[layer] = kinds.get(layer, 0) + 1
        total = sum(count * self._layer(layer, tokens) for layer, count in kinds.items())
        for layer, count in kinds.items():
            seen = min(context, sampled * layer.window) if layer.window else context
            total += count * layer.kv * seen / (self.device.bandwidth * CACHED)
        states = sampled * sum(layer.state for layer in stage.layers) / self.shape.verified  # read and written
        total += 2 * states / (self.device.bandwidth * CACHED)
        for one in stage.ends:
            if one.matrix and one.kind != "tower":
                total += self._gemm(one, sampled if one.kind == "head" else tokens)
            if one.kind == "head":
                logits = sampled * self.shape.vocab * 4
                total += 3 * logits / self.device.bandwidth + 4 * self.device.small  # the sampler reads them thrice
                if self.layout.tp > 1:
                    total += self.links.latency + logits / self.links.tensor
        host = parked(stage, self.cpu_offload)
        copies = host.copied / offload.PCIE
        if self._streams(tokens):
            total = max(total, offload.missing(stage, self.layout.offload) / min(offload.PCIE, self.host.bandwidth))
        # They run while the layers before compute, except those with experts in host memory.
        total = total + copies if self.layout.offload else max(total, copies)
        total += tokens * host.row / offload.PCIE
        if self.layout.pp > 1:
            total += self.links.hop + tokens * self.shape.hidden * self.width / self.links.stage
        return total

    def _layer(self, layer: Layer, tokens: int) -> float:
        total = SMALL_OPS * self.device.small
        total += sum(self._gemm(one, tokens) for one in layer.weights if one.matrix)
        if self.layout.tp > 1:
            total += 2 * self._all_reduce(tokens)
        experts = any(one.expert for one in layer.weights)
        if self.layout.ep > self.layout.tp and experts:  # within a tensor group all ranks have all tokens
            moved = tokens * self.shape.chosen * self.shape.hidden * self.width * 2  # there and back
            total += 2 * self.links.scatter + moved / self.layout.tp / self.links.expert
        if experts:
            total += 4 * self.device.small  # choosing, sorting, gathering, adding up
            if self.layout.offload and not self._streams(tokens):
                total += offload.fixed(tokens)
        return total

    def _cpu_alone(self, tokens: int, one: Weights) -> bool:
        share = offload.resident(one, self.layout.offload)
        return offload.cpu_alone(self.host, tokens * self.shape.chosen, share)

    def _streams(self, tokens: int) -> bool:
        return bool(self.layout.offload) and offload.streamed(tokens, self.shape.chosen, self.shape.experts)

    def _gemm(self, one: Weights, tokens: int) -> float:
        if not one.expert:
            codes = CODES if one.bytes < one.elements and not self.device.cpu else 1.0
            faster = self.fp8 if one.fp8 and tokens >= FP8_ROWS else 1.0
            return self._roof(one.bytes / codes, 2.0 * one.elements * tokens / faster) + self.device.ramp
        ep, all_experts = self.layout.ep, self.shape.experts
        chosen = max(1, self.shape.chosen)
        rows = tokens * (self.layout.dp if ep > self.layout.tp else 1)  # of all replicas that the expert group spans
        work = 2.0 * one.elements * rows * chosen / ep
        host = bool(self.layout.offload) and not self._streams(tokens)
        chances = offload.chances(all_experts, chosen, rows, self.zipf if host else 0.0)
        visited = one.copies * sum(chances) / all_experts  # of a rank's experts, on average
        spread = math.sqrt(2 * math.log(ep) * visited * (1 - visited / one.copies))  # all wait for the busiest rank
        touched = min(one.copies, visited + spread)
        if not host:
            return self._experts_on_gpu(one, touched, work, rows) + self.device.ramp
        missing = offload.Missing(one.copies, self.layout.offload, self.layout.fixed)
        missed = touched * missing.share(chances)
        left = work * missing.share(offload.chances(all_experts, chosen, 1, self.zipf))
        resident = self._roof((touched - missed) * one.slot, (work - left) / GROUPED) + self.device.ramp
        return offload.beside(self.host, tokens, self._cpu_alone(tokens, one), resident, missed * one.host, left)

    def _experts_on_gpu(self, one: Weights, touched: float, work: float, rows: float) -> float:
        """Seconds of `touched` of them. Quantised ones of many routed tokens are dequantised first, which is written
        and read; not those of FP8 on Hopper."""
        plain, pairs = one.elements * self.width, rows * self.shape.chosen / self.shape.experts
        in_8_bits = one.fp8 and self.fp8 > 1
        if self.device.cpu or one.bytes >= plain or pairs <= PAIRS or in_8_bits:
            faster = self.fp8 if in_8_bits and pairs > FP8_PAIRS else 1.0
            return self._roof(touched * one.bytes, work / (GROUPED * faster))
        made = touched * (one.bytes + plain) / (self.device.bandwidth * MADE_PLAIN)
        return made + self._roof(touched * plain, work / GROUPED)

    def _roof(self, read: float, work: float) -> float:
        memory, arithmetic = read / self.device.bandwidth, work / self.flops
        return (memory**ROUND + arithmetic**ROUND) ** (1 / ROUND)

    def _all_reduce(self, tokens: int) -> float:
        tp = self.layout.tp
        moved = tokens * self.shape.hidden * self.width * 2 * (tp - 1) / tp
        return self.links.latency + moved / self.links.tensor

    def tower(self, stage: StageShape, image: Image) -> float:
        """Seconds that the tower takes for an image, on the first stage. Each rank has a whole tower."""
        held = sum(one.bytes for one in stage.ends if one.kind == "tower")
        return self._roof(held, 2 * image.linears) + 2 * image.scores / (self.flops * SCORES)

    def scores(self, stage: StageShape, tokens: int, prompt: int) -> float:
        """Attention's arithmetic for prompt tokens: each sees half its prompt on average, or its layer's window."""
        pairs = 0.0
        for layer in stage.layers:
            most = min(prompt, layer.window or prompt)
            pairs += layer.scores * (most - most**2 / (2 * prompt))
        return tokens * pairs * 2 / (self.flops * SCORES)


def predict(
    shape: ModelShape,
    layout: Layout,
    device: Device,
    asked: Workload,
    running: int,
    budget: int,
    per_node: int,
    network: float,
) -> Speed:
    """For `running` sequences over all copies, `budget` tokens in a step of prompts."""
    running = max(1, running)
    clock = StepModel(shape, layout, device, links(layout, device, per_node, network), asked)
    each = split(running, layout.dp)
    batch = split(each, layout.pp)  # as many batches are under way as there are stages
    stages = shape.stage_shapes(layout.tp, layout.pp, layout.ep)
    decode = [clock.step(stage, batch, batch * asked.length, batch) for stage in stages]
    # With a batch for each stage the slowest stage sets the pace; a lone batch walks through all of them.
    full = min(layout.pp, each)
    pace = sum(decode) if full < layout.pp else max(decode) * layout.pp
    # A step takes as many prompts as there are, and a long one in parts of a size.
    prompts = each * asked.length
    chunk = split(prompts, split(prompts, budget))
    prompt = min(asked.length, chunk)
    prefill = [
        clock.step(stage, chunk, 0, max(1, chunk // prompt)) + clock.scores(stage, chunk, asked.length)
        for stage in stages
    ]
    tower = 0.0 if shape.images is None else clock.tower(stages[0], shape.images.usual)
    prefill[0] += asked.images * chunk / asked.length * tower / layout.tp  # shared out
    return Speed(pace * 1e3, running / pace, layout.dp * chunk / max(prefill), running, tower * 1e3)
