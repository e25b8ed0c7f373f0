"""What expert deferral costs: two losses of what the model writes, the same whatever the layout."""

import functools
import math

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank.model.experts.offload import ExpertRoom
from phalanx.rank.model.load import load
from phalanx.rank.worker import deferral_loss, kv_cache

from ..model.test_architectures import MODELS, write

BLOCKS, SIZE = 16, 4
SIZES = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("deferral"), **MODELS["qwen3_moe"] | SIZES)


def losses(path, room, blocks=BLOCKS, tp=1, pp=1, replicas=1):
    def rank(world):
        grid = mesh.build(world, tp, pp)
        model = load(path, grid, experts=room)
        caches = kv_cache.allocate(model.cache_specs(), blocks, SIZE, model.dtype, torch.device("cpu"), 4)
        measure = functools.partial(deferral_loss.measure, model, grid, caches, blocks, SIZE, torch.device("cpu"))
        return measure(), model.offload.deferral.allowed

    found = threads.run(rank, tp * pp * replicas)
    assert all(one == found[0] for one in found) and found[0][1], "steps defer afterwards"
    return found[0][0]


def test_losses(path):
    late = losses(path, ExpertRoom(100, way="cpu", defers=True))
    assert late.tokens == 2 * BLOCKS // 2 * SIZE and 0 < late.whole < late.deferred
    assert late.whole < math.log(512), "it is less surprised by what it writes than by any token"
    none = losses(path, ExpertRoom(memory=1 << 40, defers=True))
    assert none.deferred == none.whole == pytest.approx(late.whole, rel=1e-4)
    few = losses(path, ExpertRoom(100, way="cpu", defers=True), blocks=1)
    assert few.tokens == SIZE


@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2), dict(replicas=2)], ids=str)
def test_ranks(path, layout):
    one, other = (losses(path, ExpertRoom(100, way="cpu", defers=True), **ranks) for ranks in ({}, layout))
    assert other.whole == pytest.approx(one.whole, rel=1e-4)
    assert other.deferred == pytest.approx(one.deferred, rel=1e-4) or "pp" in layout, (
        "each stage's last layer owes none"
    )


def test_what_is_said():
    told = str(deferral_loss.Losses(1.5, 1.6, 192))
    assert told == (
        "--expert-deferral: over 192 tokens that the model wrote, the loss is 1.6000 nats a token instead of 1.5000, "
        "so the perplexity 1.105 times as high, with the experts that are resident now"
    )
