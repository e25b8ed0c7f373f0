"""The expert degree by measurement (`--ep 0`): whether a tensor group splits each expert, or shares experts out.

Both ways end in the same all-reduce. What differs is what a rank computes before it: slices of all experts that were
chosen, or whole ones of those that it has, where the rank with the most work lets the others wait. Which is faster
depends on sizes, batch, kernels and links. So one layer of the model's sizes is timed both ways, from routing that is
equal on all ranks to the end of the all-reduce, at several batches. As a layout is for all batches, the least geometric
mean decides.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.moe.moe import Biases, Inputs, LocalExperts, fused_experts
from .fused import FusedExperts

Model = TypeVar("Model", bound=nn.Module)
log = logging.getLogger(__name__)

ROWS = {"cpu": (1, 8, 64), "cuda": (1, 16, 64, 256, 2048), "mps": (1, 8, 64)}  # tokens of a step
DRAWS = 4  # of the experts that tokens choose: in some a rank has more to do than in others
CALLS = {"cpu": 2, "cuda": 8, "mps": 2}  # of each draw that are timed, behind one that is not
GAIN = 1.03  # less is noise: then experts are split, as without --ep


def build_measured(
    build: Callable[[Mesh], Model], mesh: Mesh, dtype: torch.dtype, device: torch.device, offloaded: bool
) -> tuple[Mesh, Model]:
    """The model, and the mesh with the expert degree that it has. Collective over the mesh's world.

    Where the degree is open (0), it is measured, if experts are plain and on the device. Only degrees that divide their
    number come into question, as then all take equal memory.
    """
    if mesh.ep:
        return mesh, build(mesh)
    mesh = dataclasses.replace(mesh, ep=1)
    model = build(mesh)
    layer = next((one for one in model.modules() if isinstance(one, FusedExperts)), None)
    own = layer is not None and (offloaded or layer.gate_up_proj.stored is not None)
    counts = mesh.world.all_gather(torch.tensor([layer.down_proj.experts.size if layer else 0, int(own)]))
    experts, unmeasured = (int(x) for x in counts.view(-1, 2).amax(0))
    degrees = [n for n in range(1, mesh.tensor.size + 1) if mesh.tensor.size % n == 0 and experts % n == 0]
    if not experts or len(degrees) == 1:
        return mesh, model
    if unmeasured:
        if mesh.world.rank == 0:
            log.info("--ep 0 measures plain experts on the device: these are split, as by --ep 1")
        return mesh, model
    rows = ROWS[device.type]
    mine = torch.zeros(len(degrees), len(rows), dtype=torch.float64)
    if layer is not None:
        for i, degree in enumerate(degrees):
            mine[i] = torch.tensor(seconds(layer, mesh, degree, rows, dtype, device))
    every = mesh.world.all_gather(mine)  # equal on all ranks, so that all choose the same
    degree, line = choose(degrees, rows, every.view(-1, *mine.shape).amax(0))
    if mesh.world.rank == 0:
        log.info(line)
    if degree == 1:
        return mesh, model
    mesh = dataclasses.replace(mesh, ep=degree)
    return mesh, build(mesh)


def choose(degrees: list[int], rows: tuple[int, ...], times: Tensor) -> tuple[int, str]:
    """The degree, the first one unless another is faster by GAIN, and a line for the log. times: [degrees, rows], in
    seconds, above 0."""
    means = times.log().mean(1).exp()
    best = int(means.argmin())
    if means[best] * GAIN > means[0]:
        best = 0
    said = (
        f"{degree}: {', '.join(f'{micro:.0f}' for micro in (one * 1e6).tolist())} us"
        for degree, one in zip(degrees, times, strict=True)
    )
    return degrees[best], (
        f"experts and their all-reduce for {', '.join(map(str, rows))} tokens by --ep {'; '.join(said)}: "
        f"--ep {degrees[best]} is chosen"
    )


@torch.no_grad()
def seconds(
    layer: FusedExperts, mesh: Mesh, degree: int, rows: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Seconds of one layer with this degree, for each of `rows`. layer: of the model built for degree 1, without
    memory. Collective over the tensor group."""
    up, down, group = layer.gate_up_proj, layer.down_proj, mesh.tensor
    experts, hidden = down.experts.size, up.inputs.size
    count, inner = experts // degree, math.ceil(down.inputs.size * degree / group.size)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    w13, w2 = zeros(count, 2 * inner, hidden), zeros(count, hidden, inner)
    biases = Biases(zeros(count, 2 * inner), zeros(count, hidden)) if up.layout.biased else Biases()
    local_experts = LocalExperts(group.rank % degree * count, count, experts) if degree > 1 else None
    make = torch.Generator().manual_seed(0)

    def step(tokens: int) -> float:
        x, weights = zeros(tokens, hidden), torch.full((tokens, layer.top_k), 1 / layer.top_k, device=device)
        draws = (torch.rand(tokens, experts, generator=make).topk(layer.top_k).indices for _ in range(DRAWS))
        ids = [draw.to(device, torch.int32) for draw in draws]
        given = Inputs(x, ids[0], weights, w13, w2, layer.activation, biases, local_experts)

        def run(calls: int) -> None:
            for draw in ids:
                for _ in range(calls):
                    group.all_reduce(fused_experts(given._replace(ids=draw)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        run(1)
        group.barrier()
        started = time.perf_counter()
        run(CALLS[device.type])
        return (time.perf_counter() - started) / (CALLS[device.type] * DRAWS)

    return [step(tokens) for tokens in rows]
