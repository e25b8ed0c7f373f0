"""Whether steps of prompts are cut into two microbatches, of which one computes while the other's all-reduce runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...comm.base import Comm
from ...comm.mesh import Mesh
from ...kernels.collective import allreduce
from ...kernels.device import device_caps
from ..model.base import Model
from .batch_builder import TILE
from .profile_run import step_seconds

MIN_MICROBATCH_TOKENS = 1024  # fewer would not fill the GPU with the GEMMs' tiles


def min_microbatch_tokens(model: Model, mesh: Mesh, device: torch.device) -> int:
    """The fewest tokens of a microbatch that may pay. Two of them hide one's all-reduces behind the other's GEMMs.

    0: steps are not split. That is so on CPUs, which cannot overlap them, on GPUs other than Hopper, where cuDNN
    computes whole prompts, and where experts are in host memory, as a rank has the buffers of one step. All-reduces
    that the kernels of allreduce.py support are too fast to be worth hiding.
    """
    if device.type != "cuda" or mesh.tensor.size == 1 or not device_caps(device).hopper or model.offload is not None:
        return 0
    return max(MIN_MICROBATCH_TOKENS, allreduce.SLOT // (model.hidden_size * model.dtype.itemsize) + 1)


def microbatch_tokens(
    model: Model, mesh: Mesh, world: Comm, say: Callable[[str], None], tokens: int, block_size: int,
    device: torch.device, kept: torch.dtype | None = None,
) -> int:  # fmt: skip
    """The fewest tokens of a microbatch; 0: steps stay whole.

    Steps of `tokens`, of half as many and so on are timed both ways, on the slowest rank, until one is faster whole.
    Two microbatches are twice as many launches, for which a host may need longer than the all-reduces take that they
    hide, the more so the shorter the step. Collective over the world. say: logs a line. kept: as of profile_run.
    """
    least = min_microbatch_tokens(model, mesh, device)
    if int(world.all_gather(torch.tensor([least])).min()) == 0:  # on one rank: all make the same collectives
        return 0
    if tokens % min(tokens, model.max_model_len) == 1:
        tokens -= 1  # a prompt's single token keeps a step whole
    chosen, timings = 0, []
    while (half := tokens // 2 // TILE * TILE) >= least:
        mine = [step_seconds(model, mesh, tokens, block_size, device, kept, one) for one in (0, least)]
        whole, split = world.all_gather(torch.tensor(mine)).view(-1, 2).amax(0).tolist()
        timings.append(f"{tokens} tokens take {whole * 1e3:.0f} ms, {split * 1e3:.0f} in two microbatches")
        if split >= whole:
            break
        chosen = max(least, half - TILE)  # a step of a few tokens less is split as well
        tokens //= 2
    if timings:
        done = f"those of {2 * chosen} prompt tokens and more are split" if chosen else "none is split"
        say(f"steps of {', of '.join(timings)}: {done}")
    return chosen
