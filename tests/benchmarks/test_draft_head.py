"""The measure of how often drafts are right."""

import torch
from phalanx.benchmarks.builtin_model.draft_head import DEPTH, Acceptance, limited, repeated


def test_the_likeliest_tokens_are_sampled():
    logits = torch.tensor([[3.0, 1.0, 2.0, -5.0], [0.0, 0.0, 0.0, 9.0]])
    assert limited(logits, 1.0, 1.0).equal(logits)
    kept = limited(logits, 2.0, 0.7).isfinite()
    assert kept.tolist() == [[True, False, True, False], [False, False, False, True]]


def test_drafts_with_the_same_noise_are_nearly_as_often_right_as_any_can_be():
    torch.manual_seed(0)
    targets = 2 * torch.randn(4000, 30)
    found = Acceptance()
    for position, noise in enumerate((0.0, 0.5, 3.0)):
        found.add(position, targets, targets + noise * torch.randn(targets.shape))
    listed = found.listed()
    for name in ("temperature 1.0, top_p 1.0", "temperature 0.7, top_p 0.95"):
        bounds, coupled = listed[f"{name}: bound"], listed[f"{name}: coupled"]
        assert bounds == sorted(bounds, reverse=True) and abs(bounds[0] - 1) < 1e-3 and coupled[0] == 1
        assert all(0.75 * bound < share < bound + 0.02 for bound, share in zip(bounds, coupled, strict=True))
    assert listed["places"] == [4000] * DEPTH


def test_a_repetition_is_right_as_often_as_its_token_is_drawn():
    """It has no distribution: the bound is the chance of the token that it names."""
    ids, vocab = [*range(3, 13)] * 3, 20
    targets = torch.zeros(len(ids), vocab)
    targets[range(len(ids) - 1), ids[1:]] = 3.0
    found = Acceptance()
    for _ in range(15):
        repeated(ids, 12, targets, found)
    listed, chance = found.listed(), float(targets[0].softmax(-1).max())
    assert listed["greedy"] == [1.0] * DEPTH and listed["places"][0] > 200
    assert all(abs(bound - chance) < 1e-5 for bound in listed["temperature 1.0, top_p 1.0: bound"])
    assert all(abs(share - chance) < 0.12 for share in listed["temperature 1.0, top_p 1.0: coupled"])
