"""Experts shared out over a tensor group: f32 logits equal transformers' within 1e-4, and each rank has its own."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.errors import USAGE, FatalError
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.load import load
from phalanx.rank.model.shard import Shard, spread

from ..harness import distance, reference, reference_logits, run_steps, tokens
from ..test_architectures import MODELS, write

TOLERANCE = 1e-4
NAMES = ("qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name), **MODELS[name]) for name in NAMES}


@pytest.fixture(scope="module")
def expected(made):
    return {name: reference_logits(reference(made[name]), tokens(60)) for name in NAMES}


def experts(path, tp, ep, **options):
    """Each rank's experts of the first layer that has some."""

    def rank(world):
        model = load(path, mesh.build(world, tp, world.size // tp, ep=ep), **options)
        return next((one for one in model.modules() if isinstance(one, FusedExperts)), None)

    return threads.run(rank, tp)


def cases():
    """The short run has more ranks than groups of experts for the architecture alone whose 10 do not divide by 4."""
    for name in NAMES:
        yield from ((name, *grid) for grid in ((2, 1, 2), (2, 2, 2), (3, 1, 3)))
        marks = [] if name == "qwen3_moe" else [pytest.mark.long]
        yield from (pytest.param(name, *grid, marks=marks) for grid in ((6, 1, 2), (12, 1, 4)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name, tp, pp, ep", list(cases()))
def test_logits(made, expected, name, tp, pp, ep):
    """Whole experts, and parts of them; counts that do not divide: 10 over 4 and 3, 16 over 3."""
    (logits,) = run_steps(made[name], [tokens(60)], tp=tp, pp=pp, ep=ep)
    assert distance(logits, expected[name]) < TOLERANCE


def test_chunks_and_mixed_batches(made):
    sequences = [tokens(n, seed=n) for n in (40, 12, 9)]
    steps = [[(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1), (2, 1)], [(0, 3)], [(1, 10), (2, 8), (0, 34)]]
    model = reference(made["qwen3_moe"])
    for ids, logits in zip(sequences, run_steps(made["qwen3_moe"], sequences, steps, tp=2, ep=2), strict=True):
        assert distance(logits, reference_logits(model, ids)) < TOLERANCE


@pytest.mark.parametrize("way", ["direct", "striped"])
def test_each_rank_reads_its_own(made, way):
    (whole,) = experts(made["qwen3_moe"], 1, 1)
    found = experts(made["qwen3_moe"], 6, 3, way=way)
    assert [one.local_experts.ids for one in found] == [range(4), range(4, 7), range(7, 10)] * 2
    for rank, one in enumerate(found):
        start, here = rank // 3 * 14, one.local_experts.ids
        gate, up = whole.gate_up_proj.weight[here].chunk(2, 1)
        part = [x[:, start : start + 14] for x in (gate, up)]
        assert torch.equal(one.gate_up_proj.weight, torch.cat(part, 1))
        assert torch.equal(one.down_proj.weight, whole.down_proj.weight[here, :, start : start + 14])
    assert found[0].num_weights == whole.num_weights * 4 // 10 // 2


def test_random_weights_do_not_depend_on_who_has_them(made):
    (whole,), parts = (experts(made["mixtral"], n, n, load_format="dummy") for n in (1, 2))
    assert torch.equal(whole.down_proj.weight, torch.cat([one.down_proj.weight for one in parts]))


def test_more_ranks_than_experts(made):
    with pytest.raises(FatalError, match="--ep 12.*experts") as stop:
        experts(made["mixtral"], 12, 12)
    assert stop.value.code == USAGE


def test_a_model_without_experts(tmp_path):
    path = write(tmp_path, **MODELS["qwen2"])
    with pytest.raises(FatalError, match="--ep 2.*experts") as stop:
        experts(path, 2, 2)
    assert stop.value.code == USAGE


@pytest.mark.parametrize("size, ranks", [(10, 4), (6, 6), (128, 3), (7, 1)])
def test_what_does_not_divide_is_spread(size, ranks):
    found = [spread(size, rank, ranks) for rank in range(ranks)]
    assert [n for one in found for n in range(one.start, one.stop)] == list(range(size))
    assert max(one.width for one in found) - min(one.width for one in found) <= 1
    assert all(isinstance(one, Shard) and one.size == size for one in found)
