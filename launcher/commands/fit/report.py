"""The output of `phalanx fit`: a table and a breakdown for people, the same as JSON for scripts."""

from __future__ import annotations

from typing import Any

import msgspec

from .devices import GIB
from .offload import FEW, FIXED, MANY_FIXED, PCIE
from .plan import Answer, LayoutEstimate
from .shape import KINDS, split


def gb(number: float) -> str:
    """Bytes as GB (10^9) with about three significant figures."""
    if not number:
        return "0"
    digits = 4 if number < 1e8 else 2 if number < 1e10 else 1
    return f"{number / 1e9:.{digits}f}"


def heading(answer: Answer) -> list[str]:
    shape, cluster, asked = answer.shape, answer.cluster, answer.asked
    device = cluster.device
    active = "" if shape.chosen == 0 else f", {shape.active / 1e9:.2f} billion at work for a token"
    kind = f"rank{'s' * (cluster.per_node > 1)} on CPUs" if device.cpu else device.name
    place = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    return [
        f"{shape.name}: {shape.model_type}, {shape.parameters / 1e9:.2f} billion parameters{active}; "
        f"{answer.checkpoint}",
        f"on {place} with {cluster.per_node} {kind}, {device.memory / GIB:.1f} GiB for each rank "
        f"(speeds: {device.source}); computing in {asked.dtype}",
        f"for {asked.concurrency} sequences of up to {asked.context} tokens, {asked.length} on average"
        + (f", with {asked.images} image{'s' * (asked.images > 1)} in each" if asked.images else ""),
    ]


COLUMNS = (
    ("tp", 3), ("pp", 3), ("dp", 3), ("ep", 4), ("weights GB", 11), ("KV GB", 8), ("KV tokens", 11), ("sequences", 10),
    ("decode ms", 10), ("tokens/s", 9), ("prefill/s", 10),
)  # fmt: skip


def table(figures: list[LayoutEstimate], chosen: LayoutEstimate | None) -> list[str]:
    """Per rank: weights and KV cache. KV tokens, sequences and speeds are the whole job's."""
    lines = ["  " + " ".join(f"{name:>{width}}" for name, width in COLUMNS)]
    for one in figures:
        layout, held, speed = one.layout, one.memory, one.speed
        left = [layout.tp, layout.pp, layout.dp, layout.ep, gb(held.heaviest.loaded)]
        if one.runs:
            left += [
                gb(held.kv_bytes), held.kv_capacity * layout.dp, one.together, f"{speed.decode_ms:.2f}",
                f"{speed.tokens_per_s:.0f}", f"{speed.prefill_per_s:.0f}",
            ]  # fmt: skip
        words = " ".join(f"{text!s:>{width}}" for text, (_, width) in zip(left, COLUMNS, strict=False))
        if layout.offload:
            words += f"  {layout.offload} experts a layer in host memory alone"
            words += f", {layout.fixed} on the GPU alone" if layout.fixed else ""
        remarks = "; ".join(remark for remark in (one.verdict, one.unserved) if remark)
        lines.append(f"{'>' if one is chosen else ' '} {words}  {remarks}".rstrip())
    return lines


def breakdown(one: LayoutEstimate) -> list[str]:
    """A rank's memory, on the stage with the most weights."""
    stage, held = one.memory.heaviest, one.memory
    slots = f"; {gb(stage.host)} in host memory, buffers for them {gb(stage.slots)}" if stage.host else ""
    parts = [f"{kind} {gb(stage.weights[kind])}" for kind in KINDS if stage.weights[kind]]
    return [
        f"GB on a rank: {', '.join(parts)} = {gb(stage.loaded)} weights{slots}; "
        f"rope tables {gb(stage.rope)}; libraries about "
        f"{gb(held.runtime)}; KV cache {gb(held.kv_bytes)} ({stage.kv_token} bytes a token); "
        f"left for a step {gb(max(0.0, held.spare))}, of which it needs about {gb(held.activations)}"
    ]


def drafts(answer: Answer, one: LayoutEstimate) -> list[str]:
    """The memory of drafts, where a model makes them."""
    last, count = one.memory.stages[-1], answer.shape.verified - 1
    if not last.weights["drafts"]:
        return []
    cache = last.drafts_kv * one.memory.kv_tokens
    return [
        f"The model that drafts, on each rank of the last stage: {gb(last.weights['drafts'])} GB of weights, and "
        f"{gb(cache)} GB of the KV cache ({last.drafts_kv} bytes a token); up to {count} drafts of a sequence in a step"
    ]


def images(answer: Answer, one: LayoutEstimate) -> list[str]:
    """The costs of images, where the model takes any."""
    if (both := answer.shape.images) is None:
        return []
    usual, largest = both.usual, both.largest
    cache = usual.tokens * sum(stage.kv_token for stage in one.memory.stages)
    most = answer.asked.context // usual.tokens
    return [
        f"An image of {usual.width} x {usual.height} pixels: {usual.tokens} tokens, {gb(cache)} GB of KV cache, and "
        f"about {one.speed.image_ms:.0f} ms of the tower; a sequence has at most {most}. The largest, {largest.width} "
        f"x {largest.height}: {largest.tokens} tokens"
    ]


def offloaded(answer: Answer, one: LayoutEstimate) -> list[str]:
    """The places of a rank's experts, and the speeds that are assumed."""
    layout, host = one.layout, answer.cluster.device.host
    held = split(answer.shape.experts, layout.ep)
    stage = max(one.memory.stages, key=lambda stage: stage.host - stage.parked)
    few, many = (round(seconds * 1e6) for seconds in (FIXED, MANY_FIXED))
    running = "1 sequence" if one.speed.running == 1 else f"{one.speed.running} sequences"
    resident, on_gpu, lie = f"{held - layout.offload} resident", "resident", "all"
    if layout.fixed:  # which serving finds by itself
        resident = f"{layout.fixed} fixed on the GPU alone, {held - layout.offload - layout.fixed} resident"
        on_gpu, lie = "of both", str(held - layout.fixed)
    lines = [
        f"Experts on a rank: {layout.offload} of a layer's {held} in host memory alone "
        f"(--num-experts-offload-per-rank {layout.offload}), {resident}; "
        f"{gb(stage.resident)} GB {on_gpu}, {gb(stage.host - stage.parked)} GB on the host, where {lie} of them lie; "
        f"{one.speed.tokens_per_s:.0f} tokens/s for {running}, {one.even:.0f} if all are chosen evenly"
    ]
    zipf = answer.asked.zipf
    routing = f"routing by Zipf's law with an exponent of {zipf:g} (--zipf)" if zipf else "even routing"
    if host is not None:
        lines.append(
            f"Of host memory a rank's CPU and copies read {gb(host.bandwidth)} GB/s together, the CPU alone "
            f"{gb(host.cpu)}, and it computes {host.flops / 1e12:.2f} TFLOP/s ({host.source}); assumed as well: "
            f"{routing}, {PCIE / 1e9:.0f} GB/s of PCIe, and {few} us a layer between GPU and host, {many} of more than "
            f"{FEW} sequences"
        )
    return lines


def text(answer: Answer) -> list[str]:
    best = answer.best
    offloading = best is None or best.layout.offload
    shown = [one for one in answer.figures if offloading or not one.layout.offload]
    lines = [*heading(answer), "", *table(shown, best), ""]
    if answer.smallest is not None:
        one = answer.smallest
        ranks = "1 rank" if one.ranks == 1 else f"{one.ranks} ranks"
        lines.append(f"The fewest of these devices that hold it: {ranks} (tp {one.tp}, pp {one.pp})")
    if best is None:
        return [*lines, "Nothing fits."]
    lines += breakdown(best) + drafts(answer, best) + images(answer, best)
    lines += offloaded(answer, best) if best.layout.offload else []
    if faster := next((one for one in answer.figures if _beats(one, best)), None):
        one = faster.layout
        lines.append(f"tp {one.tp}, pp {one.pp}, dp {one.dp}, ep {one.ep} would be faster, but {faster.unserved}")
    lines.append("Run:" if not best.unserved else f"To run once it is served ({best.unserved}):")
    return [*lines, *(f"  {line}" for line in answer.command)]


def _beats(one: LayoutEstimate, chosen: LayoutEstimate) -> bool:
    better = one.speed.tokens_per_s > chosen.speed.tokens_per_s
    return bool(one.unserved) and not chosen.unserved and one.runs and not one.verdict and better


def as_json(answer: Answer) -> dict[str, Any]:
    """All bytes are bytes, times as named; `best` is the index of the chosen layout, null when nothing fits."""
    shape, cluster, asked = answer.shape, answer.cluster, answer.asked
    device = cluster.device
    return {
        "model": {
            "name": shape.name, "type": shape.model_type, "parameters": shape.parameters, "active": shape.active,
            "layers": shape.layers, "checkpoint": answer.checkpoint,
            "images": None if shape.images is None else msgspec.to_builtins(shape.images),
        },
        "cluster": {
            "nodes": cluster.nodes, "ranks_per_node": cluster.per_node, "device": device.name,
            "memory": round(device.memory), "bandwidth": device.bandwidth, "flops": device.flops,
            "link": device.link, "network": cluster.network, "source": device.source,
            "host": None if device.host is None else msgspec.structs.asdict(device.host),
        },
        "asked": {
            "context": asked.context, "concurrency": asked.concurrency, "length": asked.length, "dtype": asked.dtype,
            "images": asked.images, "zipf": asked.zipf, "speculate": asked.speculate, "drafts": shape.verified - 1,
        },
        "layouts": [_layout(one) for one in answer.figures],
        "best": None if answer.best is None else answer.figures.index(answer.best),
        "command": answer.command,
    }  # fmt: skip


def _layout(one: LayoutEstimate) -> dict[str, Any]:
    layout, held, stage = one.layout, one.memory, one.memory.heaviest
    return {
        "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "offload": layout.offload,
        "fixed": layout.fixed,
        "fits": one.runs, "verdict": one.verdict or "everything asked for fits", "short": round(held.short),
        "served": not one.unserved, "why_not_served": one.unserved,
        "weights": stage.weights, "weight_bytes": stage.loaded, "host_bytes": max(s.host for s in held.stages),
        "resident_bytes": max(s.resident for s in held.stages), "slot_bytes": stage.slots,
        "rope_bytes": stage.rope, "runtime_bytes": round(held.runtime), "activation_bytes": round(held.activations),
        "draft_bytes": held.stages[-1].weights["drafts"], "draft_kv_bytes_per_token": held.stages[-1].drafts_kv,
        "kv_bytes_per_token": stage.kv_token, "kv_bytes": held.kv_bytes, "kv_tokens": held.kv_capacity * layout.dp,
        "sequences": one.together,
        "stages": [
            {"layers": s.layers, "weight_bytes": s.loaded, "kv_bytes_per_token": s.kv_token} for s in held.stages
        ],
        "decode_ms": one.speed.decode_ms, "decode_tokens_per_s": one.speed.tokens_per_s,
        "even_tokens_per_s": one.even or None,
        "running": one.speed.running, "prefill_tokens_per_s": one.speed.prefill_per_s,
        "image_ms": one.speed.image_ms or None,
    }  # fmt: skip
