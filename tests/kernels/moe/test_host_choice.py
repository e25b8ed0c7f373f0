"""Which experts are copied and which the CPU computes: C++ beside numpy, and what the costs make of it."""

import numpy as np
import pytest
import torch
from phalanx.kernels.moe import host_choice
from phalanx.kernels.moe.host_choice import CHEAPEST, COPIED, ON_CPU, Choice, Costs


def made(compiled, monkeypatch, ids, slot_of, scores, costs, way, first=0, limit=1 << 30):
    with monkeypatch.context() as patch:
        if not compiled:
            patch.setattr(host_choice.ops, "available", lambda: False)
        choice = Choice(len(slot_of), first, costs, way)
        choice.choose(ids, slot_of, scores, limit)
    return choice


@pytest.mark.parametrize("way", [CHEAPEST, ON_CPU, COPIED])
def test_both_agree(monkeypatch, way):
    draw = np.random.default_rng(0)
    for turn in range(30):
        experts, tokens = int(draw.integers(1, 40)), int(draw.integers(1, 30))
        ids = torch.from_numpy(draw.integers(0, 50, (tokens, 4)).astype(np.int32))
        slot_of = np.where(draw.random(experts) < 0.4, 1, -1)
        costs, scores = Costs(tuple(np.sort(draw.random(4))), draw.random()), draw.random(experts)
        both = []
        limit = int(draw.integers(0, 9))
        for compiled in (True, False):
            mine = scores.copy()
            one = made(compiled, monkeypatch, ids, slot_of, mine, costs, way, turn % 5, limit)
            both.append((one.counts, one.cpu, one.copied, one.found, mine))
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
        counts, cpu, copied, found, _ = both[0]
        assert set(copied) | set(np.flatnonzero(cpu >= 0)) == set(np.flatnonzero((counts > 0) & (slot_of < 0)))
        assert way != CHEAPEST or len(copied) <= limit
        assert found[3] == counts[cpu >= 0].sum() and found[:3].sum() == (counts > 0).sum()


@pytest.mark.parametrize("compiled", [True, False])
def test_copies_are_for_the_experts_with_the_most_tokens(monkeypatch, compiled):
    costs = Costs((10.0, 10.0, 16.0, 64.0), copy=30.0)  # the CPU takes 10 up to 4 tokens, then more
    ids = torch.tensor([[4], [6], [6], [7], *[[5]] * 200], dtype=torch.int32)

    def copied(costs, ids):
        return made(compiled, monkeypatch, ids, np.full(8, -1), np.zeros(8), costs, CHEAPEST).copied.tolist()

    assert copied(costs, ids) == [5]
    assert copied(costs, ids[:1]) == [] == copied(costs, ids[:0])
    assert sorted(copied(costs._replace(copy=0.0), ids)) == [4, 5, 6, 7]
