"""Decode steps of several tokens of a sequence on a GPU, beside its own steps of one token."""

import functools

import pytest
import torch

from ...devices import require_gpu
from ..model.harness import distance
from .test_query_len import NAMES, TOLERANCE, check_rejected, made, on_two_ranks, plain, run, several

require_gpu()
__all__ = ["made"]  # a fixture


@pytest.fixture(scope="module")
def wanted(made):
    return functools.cache(lambda name: run(plain, made(name), 1, False, "cuda"))


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_four_tokens_is_four_steps_of_one(made, wanted, name, replays):
    assert distance(run(several, made(name), 1, replays, "cuda"), wanted(name)[:, :17]) < TOLERANCE


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rejected_tokens_leave_no_trace(made, wanted, name, replays):
    check_rejected(made(name), wanted(name), 1, replays, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replayed_steps_of_two_ranks(made, wanted, tmp_path):
    found = on_two_ranks(tmp_path, {name: str(made(name)) for name in NAMES}, "cuda")
    for name, (logits, captured) in found.items():
        assert captured == [(1, 4), (2, 4), (4, 4)] and distance(logits, wanted(name)[:, :17]) < TOLERANCE
