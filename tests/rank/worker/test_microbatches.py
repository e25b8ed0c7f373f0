"""Thresholds for cutting steps of prompts in two: by the GPU and the sizes, and by what both ways take."""

import re
from types import SimpleNamespace

import pytest
import torch
from phalanx.rank.worker import microbatches as module
from phalanx.rank.worker.microbatches import microbatch_tokens, min_microbatch_tokens


@pytest.mark.parametrize(
    "device, ranks, hidden, dtype, least",
    [
        ("cpu", 2, 8192, torch.bfloat16, 0),
        ("hopper", 1, 8192, torch.bfloat16, 0),
        ("hopper", 4, 8192, torch.bfloat16, 1024),
        ("hopper", 4, 4096, torch.bfloat16, 1025),  # more than kernels add up
        ("hopper", 2, 4096, torch.float32, 1024),
        ("hopper", 2, 1024, torch.bfloat16, 4097),
        ("ampere", 4, 8192, torch.bfloat16, 0),
    ],
)
def test_steps_are_cut_where_their_sums_go_over_nccl(device, ranks, hidden, dtype, least, monkeypatch):
    caps = SimpleNamespace(hopper=device == "hopper")
    monkeypatch.setattr(module, "device_caps", lambda _: caps)
    model = SimpleNamespace(hidden_size=hidden, dtype=dtype, offload=None)
    mesh, place = (
        SimpleNamespace(tensor=SimpleNamespace(size=ranks)),
        torch.device("cpu" if device == "cpu" else "cuda"),
    )
    assert min_microbatch_tokens(model, mesh, place) == least
    model.offload = object()  # experts in host memory
    assert min_microbatch_tokens(model, mesh, place) == 0


class World:
    """Two ranks, of which the other one measures 30 ms both ways."""

    def __init__(self, least=1024):
        self.least = least  # the other's

    def all_gather(self, x):
        return torch.stack([x, torch.tensor([0.03, 0.03]) if x.is_floating_point() else torch.tensor([self.least])])


def choose(monkeypatch, seconds, tokens, world, longest=1 << 20, least=1024):
    """The choice and its log line, where a step of T tokens takes seconds[T]: whole, split."""
    monkeypatch.setattr(module, "min_microbatch_tokens", lambda *_: least)
    monkeypatch.setattr(module, "step_seconds", lambda *given: seconds[given[2]][given[-1] > 0])
    told, model = [], SimpleNamespace(max_model_len=longest)
    return microbatch_tokens(model, None, world, told.append, tokens, 16, torch.device("cuda")), told


@pytest.mark.parametrize(
    "seconds, tokens, chosen, said",
    [
        (
            {8192: (0.1, 0.09), 4096: (0.05, 0.051)}, 8192, 3968,
            "steps of 8192 tokens take 100 ms, 90 in two microbatches, of 4096 tokens take 50 ms, 51 in two "
            "microbatches: those of 7936 prompt tokens and more are split",
        ),
        (
            {8192: (0.09, 0.1)}, 8192, 0,
            "steps of 8192 tokens take 90 ms, 100 in two microbatches: none is split",
        ),
        (
            {8192: (0.02, 0.01)}, 8192, 0,  # the other rank is the slower one
            "steps of 8192 tokens take 30 ms, 30 in two microbatches: none is split",
        ),
        ({8192: (0.1, 0.09), 4096: (0.06, 0.05), 2048: (0.05, 0.04)}, 8192, 1024, "of 2048 prompt tokens and more"),
        ({}, 2047, 0, ""),  # no step is so long
    ],
)  # fmt: skip
def test_the_shortest_steps_that_are_faster_split_on_the_slowest_rank(seconds, tokens, chosen, said, monkeypatch):
    found, told = choose(monkeypatch, seconds, tokens, World())
    assert found == chosen and bool(told) == bool(said) and all(said in one for one in told)


def test_a_prompts_single_token_is_left_out(monkeypatch):
    found, told = choose(monkeypatch, {8191: (0.1, 0.2)}, 8192, World(), longest=8191)
    (said,) = told
    assert found == 0 and re.search("8191 tokens.*100 ms.*200", said)


def test_ranks_with_other_gpus_make_the_same_collectives(monkeypatch):
    for least, other in ((1024, 0), (0, 1024)):
        assert choose(monkeypatch, {}, 8192, World(other), least=least) == (0, [])
