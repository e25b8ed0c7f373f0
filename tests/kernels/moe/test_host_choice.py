"""Which experts are copied and which the CPU computes: C++ beside numpy, and what the costs make of it."""

import numpy as np
import pytest
import torch
from phalanx.benchmarks.offload import draw
from phalanx.kernels.cpp import graph, ops
from phalanx.kernels.moe.host_choice import ADOPTED, CHEAPEST, COPIED, ON_CPU, Choice, Costs, Residency

from . import choice_reference

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ operations")


def made(compiled, ids, of, costs, mode, first=0, limit=1 << 30, adopts=False, fixed=0, lag=0.0):
    choice = Choice(len(of.slot_of), first, costs, mode, fixed)
    choice.lag[:] = lag
    (Choice.choose if compiled else choice_reference.choose)(choice, ids, of, limit, adopts)
    return choice


def residency(draw, experts):
    """Some in slots, of which one is not to be used."""
    in_slots = draw.permutation(experts)[: int(draw.integers(0, experts))]
    slot_of = np.full(experts, -1)
    slot_of[in_slots[1:]] = np.arange(1, len(in_slots))
    return Residency(slot_of, 20 * draw.random(experts), in_slots)


def test_what_the_host_chooses_is_not_replayed():
    """Other tokens choose other experts, and what follows was launched for as many as were chosen then."""
    choice, ids = Choice(4, 0, Costs((1.0,) * 4, 1.0), ON_CPU), torch.zeros(1, 2, dtype=torch.int32)
    of = Residency.of_first(4, 0)
    _, made_graph, reason = graph.capture(lambda: choice.choose(ids, of), graph.Memory())
    assert made_graph is None and "host" in reason


@pytest.mark.parametrize("adopts", [False, True])
@pytest.mark.parametrize("mode", [CHEAPEST, ON_CPU, COPIED, ADOPTED])
def test_both_agree(mode, adopts):
    draw, moved = np.random.default_rng(0), 0
    for turn in range(60):
        experts, tokens = int(draw.integers(1, 40)), int(draw.integers(1, 30))
        ids = torch.from_numpy(draw.integers(0, 50, (tokens, 4)).astype(np.int32))
        before = residency(draw, experts)
        costs = Costs(tuple(np.sort(draw.random(4))), draw.random(), 1 + draw.random(), 1 + draw.random())
        both = []
        limit, fixed = int(draw.integers(0, 9)), turn % 3
        for compiled in (True, False):
            of = Residency(*(one.copy() for one in before))
            one = made(compiled, ids, of, costs, mode, turn % 5, limit, adopts, fixed)
            both.append((one.counts, one.cpu, one.copied, one.adopted, one.found, *of, one.of_fixed))
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
        counts, cpu, copied, adopted, found, slot_of, _, expert_in, of_fixed = both[0]
        assert set(copied) | set(np.flatnonzero(cpu >= 0)) == set(np.flatnonzero((counts > 0) & (before.slot_of < 0)))
        assert mode != CHEAPEST or len(copied) <= limit
        assert mode != ADOPTED or len(copied) == found[4] <= min(limit, 1) and (cpu[copied] == copied).all()
        served = found[:2] if mode == ADOPTED else found[:3]
        assert found[3] == counts[cpu >= 0].sum() and served.sum() == (counts > 0).sum() + (of_fixed > 0).sum()
        before_first = [turn % 5 - fixed + one for one in range(fixed)]
        assert of_fixed.tolist() == [int((ids == one).sum()) for one in before_first]
        for expert, slot in zip(copied, adopted, strict=True):
            assert slot == slot_of[expert] and (slot < 0 or (expert_in[slot] == expert and slot))
        assert found[4] == (adopted >= 0).sum() == (slot_of != before.slot_of).sum() / 2
        moved += found[4]
    assert (moved > 0) == (adopts and mode != ON_CPU)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_expert_that_is_chosen_often_is_copied_once(compiled):
    """Even where the CPU would be faster, and it takes the slot of the one that is chosen least."""
    costs = Costs((1.0, 1.0, 1.0, 1.0), copy=9.0)
    of = Residency(np.array([0, 1, -1, -1]), np.array([3.0, 1.0, 9.0, 2.0]), np.array([0, 1]))
    ids = torch.tensor([[3, 2]], dtype=torch.int32)
    first = made(compiled, ids, of, costs, CHEAPEST, adopts=True)
    assert first.copied.tolist() == [2] and first.adopted.tolist() == [1] and first.found.tolist() == [0, 1, 1, 1, 1]
    assert of.slot_of.tolist() == [0, -1, 1, -1] and of.expert_in.tolist() == [0, 2]
    second = made(compiled, ids, of, costs, CHEAPEST, adopts=True)
    assert second.found.tolist() == [1, 1, 0, 1, 0]
    of = Residency(np.array([0, 1, -1, -1]), np.array([3.0, 1.0, 9.0, 2.0]), np.array([0, 1]))
    assert made(compiled, ids, of, costs, CHEAPEST, limit=0, adopts=True).found[4] == 0


@pytest.mark.parametrize("compiled", [True, False])
def test_what_copies_take_besides(compiled):
    """Half of eight missing experts are copied where the CPU and copies take equally long, and fewer the longer
    copies take besides."""
    ids, found = torch.arange(8, dtype=torch.int32)[None], []
    for lag in (0.0, 2.0, 5.0, 9.0):
        costs, of = Costs((1.0, 1.0, 1.0, 1.0), copy=1.0), Residency(np.full(8, -1), np.zeros(8), np.zeros(0, np.int64))
        found.append(len(made(compiled, ids, of, costs, CHEAPEST, lag=lag).copied))
    assert found == [4, 3, 1, 0]


@pytest.mark.parametrize("exponent, early, late, most", [(0.0, 0.45, 0.45, 80), (0.8, 0.72, 0.75, 80)])
def test_the_resident_set_follows_popularity_and_not_chance(exponent, early, late, most):
    """Half of 128 experts, 8 of which each step draws by a Zipf law: how many of steps 100 to 200 and 400 to 800 are
    resident, and how many become so in 800 steps, one at a time being computed faster by the CPU."""
    draw, found, ids = np.random.default_rng(0), [], torch.zeros(1, 8, dtype=torch.int32)
    order, likely = draw.permutation(128), -exponent * np.log(np.arange(1, 129))
    of = Residency(np.where(np.arange(128) < 64, np.arange(128), -1), np.zeros(128), np.arange(64))
    choice = Choice(128, 0, Costs((45.0, 56.0, 125.0, 485.0), 65.0, 1.3, 1.1), CHEAPEST)
    for _ in range(800):
        ids[0] = torch.from_numpy(order[np.argsort(likely + draw.gumbel(size=128))[-8:]])
        choice.choose(ids, of, 8, adopts=True)
        found.append(choice.found.copy())
    resident, adopted = np.array(found)[:, 0] / 8, np.array(found)[:, 4]
    assert resident[100:200].mean() > early and resident[400:].mean() > late and 0 < adopted.sum() < most


def test_the_resident_set_is_nearly_the_best_one():
    """The benchmark's draws, in six layers: no set has more of what independent draws choose than the most popular
    experts, of which this one must have 97 % after 400 steps."""
    resident, best = 0, 0
    for layer in range(1, 7):
        choices = draw(0.8, 128, 8, layer)
        popular = torch.randperm(128, generator=torch.Generator().manual_seed(layer))[:64]
        of = Residency(np.where(np.arange(128) < 64, np.arange(128), -1), np.zeros(128), np.arange(64))
        choice = Choice(128, 0, Costs((52e-6, 60e-6, 90e-6, 200e-6), 70e-6, 1.3, 1.2), CHEAPEST)
        for step in range(800):
            choice.choose(choices[step : step + 1].contiguous(), of, 8, adopts=True)
            if step >= 400:
                resident += choice.found[0]
                best += torch.isin(choices[step], popular).sum()
    assert best > 0.78 * 6 * 400 * 8 and resident > 0.97 * best


@pytest.mark.parametrize("compiled", [True, False])
def test_copies_are_for_the_experts_with_the_most_tokens(compiled):
    costs = Costs((10.0, 10.0, 16.0, 64.0), copy=30.0)  # the CPU takes 10 up to 4 tokens, then more
    ids = torch.tensor([[4], [6], [6], [7], *[[5]] * 200], dtype=torch.int32)

    def none():
        return Residency(np.full(8, -1), np.zeros(8), np.zeros(0, np.int64))

    def copied(costs, ids):
        return made(compiled, ids, none(), costs, CHEAPEST).copied.tolist()

    assert copied(costs, ids) == [5]
    assert copied(costs, ids[:1]) == [] == copied(costs, ids[:0])
    assert sorted(copied(costs._replace(copy=0.0), ids)) == [4, 5, 6, 7]


def test_the_memory_is_shared():
    """CPU and copies slow each other; who is left has all of it."""
    costs = Costs((1.0,) * 4, copy=1.0, cpu_overlapped=2.0, copy_overlapped=4.0)
    assert choice_reference.both(costs, np.array([0.0, 3.0, 3.0]), np.array([5.0, 0.0, 2.0])).tolist() == [
        5.0,
        3.0,
        6 + 2 / 4,
    ]
