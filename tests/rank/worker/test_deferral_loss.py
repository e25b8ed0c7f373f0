"""What expert deferral costs: two losses of what the model writes, the same whatever the layout."""

import math
from types import SimpleNamespace

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank.model.experts.deferral import Deferral
from phalanx.rank.model.experts.host_steps import Counters
from phalanx.rank.model.experts.offload import ExpertRoom
from phalanx.rank.model.load import load
from phalanx.rank.worker import deferral_loss, kv_cache

from ..model.test_architectures import MODELS, write

BLOCKS, SIZE = 16, 4
SIZES = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 4}
DEFERS = ExpertRoom(100, way="cpu", defers=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("deferral"), **MODELS["qwen3_moe"] | SIZES)


def losses(path, experts, blocks=BLOCKS, sequences=4, tp=1, pp=1, replicas=1):
    def rank(world):
        grid = mesh.build(world, tp, pp)
        model, cpu = load(path, grid, experts=experts), torch.device("cpu")
        caches = kv_cache.allocate(model.cache_specs(), blocks, SIZE, model.dtype, cpu, sequences)
        room, done = deferral_loss.Room(caches, blocks, SIZE, sequences), []
        found = deferral_loss.measure(model, grid, room, cpu, done.append)
        steps = found.tokens // min(2, sequences, blocks)
        assert done == list(range(1, 2 * steps + 1)), "the watchdog sees each step"
        return found, model.offload.deferral.allowed

    found = threads.run(rank, tp * pp * replicas)
    assert all(one == found[0] for one in found) and found[0][1], "steps defer afterwards"
    return found[0][0]


def test_losses(path):
    late = losses(path, DEFERS)
    assert late.tokens == 2 * BLOCKS // 2 * SIZE and 0 < late.whole < late.deferred
    assert late.whole < math.log(512), "it is less surprised by what it writes than by any token"
    none = losses(path, ExpertRoom(memory=1 << 40, defers=True))
    assert none.deferred == none.whole == pytest.approx(late.whole, rel=1e-4)
    few = losses(path, DEFERS, blocks=1)
    assert few.tokens == SIZE


def test_room_for_one_sequence(tmp_path):
    """A hybrid has a recurrent state for each of --max-num-seqs sequences, and no more."""
    hybrid = write(tmp_path, **MODELS["qwen3_next"])
    late, none = (losses(hybrid, room, sequences=1) for room in (DEFERS, ExpertRoom(memory=1 << 40, defers=True)))
    assert late.tokens == deferral_loss.STEPS and 0 < late.whole < late.deferred
    assert none.deferred == none.whole, "each pass begins with a state of zeros"


@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2), dict(replicas=2)], ids=str)
def test_ranks(path, layout):
    one, other = (losses(path, DEFERS, **ranks) for ranks in ({}, layout))
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


def test_where_no_step_defers(monkeypatch):
    """It is said, and /metrics do not count what was measured."""
    monkeypatch.setattr(deferral_loss, "measure", lambda *_: deferral_loss.Losses(1.5, 1.5, 192))
    model = SimpleNamespace(offload=SimpleNamespace(deferral=Deferral(), counters=Counters(1, 2, 3, 4)))
    assert deferral_loss.told(model, None, None, None, None) == (
        "--expert-deferral does nothing: the CPU serves no steps of few tokens beside this GPU, for want of a C++ "
        "compiler, as CUDA_LAUNCH_BLOCKING is set, or as the model's rows are no multiple of 16 bytes"
    )
    assert model.offload.counters == Counters()
    model.offload.deferral.used = True
    assert "the loss is 1.5000" in deferral_loss.told(model, None, None, None, None)
