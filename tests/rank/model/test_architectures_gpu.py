"""Every architecture in bf16 on a GPU, a prompt and then token by token: about as near to f32 as bf16 is on CPUs."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank.model.load import load
from phalanx.rank.worker import kv_cache

from ...devices import require_gpu
from ..test_served import SERVED, Expected, write_checkpoint
from .harness import forward, make_batch, moved, tokens

require_gpu()

PROMPT, COUNT, BLOCK = 60, 80, 16  # tokens: of the prompt, which is longer than any window, and in all; of a block
# A GPU adds up in another order than the CPU, and may be so many times as far from f32, and a little more.
TIMES, FLOOR = 2.0, 0.02
# Without experts, nine of ten tokens are at most so many times as far as half of them may be: roundings add up alike
# in all tokens, and on CPUs (2026-11-26) the farthest of these nine is 1.1 to 1.9 times as far as the median.
TAIL = 2.0


@pytest.mark.parametrize("name", SERVED)
def test_bf16(tmp_path, name):
    path, ids = write_checkpoint(tmp_path, SERVED[name]), tokens(COUNT)
    want = Expected.of(path, SERVED[name]).logits(*ids)
    far = {device: distances(logits_of(path, ids, device), want) for device in ("cpu", "cuda")}
    experts = any("experts" in key for key in SERVED[name] | SERVED[name].get("text_config", {}))
    for (median, tail), (cpu, _) in zip(far["cuda"], far["cpu"], strict=True):
        bound = TIMES * cpu + FLOOR
        assert median <= bound and (experts or tail <= TAIL * bound), far


def distances(found, want):
    """Distances of the prompt and of what is decoded: half of the tokens' logits are not farther, and nine of ten, as
    shares of the logits' root mean square. The others may have visited other experts, whose scores are nearly equal."""
    assert found.isfinite().all()
    far = (found - want).square().mean(-1).sqrt() / want.square().mean().sqrt()
    return [part.quantile(torch.tensor([0.5, 0.9])).tolist() for part in (far[:PROMPT], far[PROMPT:])]


def logits_of(path, ids, device):
    """[len(ids), vocab] f32 of bf16, on the CPU. A read of a slot that was never written shows as NaN."""

    def one(comm):
        grid = mesh.build(comm, 1, 1)
        model = load(path, grid, device, "bf16", max_model_len=128)
        table = list(range(-(-len(ids) // BLOCK), 0, -1))
        caches = kv_cache.allocate(model.cache_specs(), len(table) + 1, BLOCK, model.dtype, torch.device(device), 1)
        for tensor in (tensor for layer in caches for tensor in layer):
            tensor.fill_(float("nan"))
        steps = [(ids[:PROMPT], 0), *(([ids[i]], i) for i in range(PROMPT, len(ids)))]
        batches = [moved(make_batch([(fresh, done, table)], BLOCK, caches), device) for fresh, done in steps]
        return torch.cat([forward(model, grid, batch).cpu() for batch in batches])

    with torch.no_grad():
        (logits,) = threads.run(one, 1)
    return logits
