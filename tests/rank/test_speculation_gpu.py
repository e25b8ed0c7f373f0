"""Speculation changes no token on a GPU, whatever the drafts: random requests in f32 get what they get without."""

import pytest

from ..devices import require_gpu
from .speculating import check
from .test_drafting import check_built_in
from .test_speculation import MANY, MIXERS, WAYS, made

require_gpu()
__all__ = ["made"]  # a fixture
ONE_GPU = ["eager", "preemption", "host memory", *(f"{kind}, one rank" for kind in MIXERS)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ONE_GPU)
def test_many_requests(made, name):
    model, how = WAYS[name]
    assert check(made(model), requests=MANY, seed=3, device="cuda:0", **how).verified["right"]


@pytest.mark.parametrize("kind", ["mtp", "draft"])
def test_drafts_that_the_ranks_keep(kind):
    check_built_in(kind, 1, 1, "cuda:0")
