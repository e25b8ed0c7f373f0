"""Where steps of prompts are cut in two: by the GPU and the sizes, and by what both ways take."""

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
    """Two ranks, of which the other one measures 3 s both ways."""

    def all_gather(self, x):
        return torch.stack([x, torch.tensor([3.0, 3.0])])


@pytest.mark.parametrize(
    "whole, split, tokens, chosen, said",
    [
        (
            4.0,
            3.5,
            8192,
            1024,
            "4000 ms, and 3500 ms in two microbatches, so steps of 2048 prompt tokens and more are cut",
        ),
        (3.5, 4.0, 8192, 0, "a step of 8192 tokens takes 3500 ms, and 4000 ms in two microbatches, so no step is cut"),
        (2.0, 1.0, 8192, 0, "3000 ms, and 3000 ms"),  # the other rank is the slower one
        (0.0, 0.0, 2047, 1024, ""),  # no step is so long
    ],
)
def test_the_faster_way_on_the_slowest_rank(whole, split, tokens, chosen, said, monkeypatch):
    monkeypatch.setattr(module, "min_microbatch_tokens", lambda *_: 1024)
    monkeypatch.setattr(module, "step_seconds", lambda *given: split if given[-1] else whole)
    told = []
    assert microbatch_tokens(None, None, World(), told.append, tokens, 16, torch.device("cuda")) == chosen
    assert bool(told) == bool(said) and all(said in one for one in told)
