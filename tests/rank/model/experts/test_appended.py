"""Shared experts that are held behind the others, as GPUs have them, here on a CPU."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels.moe.moe import Held
from phalanx.rank.model import load
from phalanx.rank.model.experts import fused
from phalanx.rank.model.layers import moe
from phalanx.rank.model.shard import whole

from ..harness import distance, run_steps, tokens
from ..test_architectures import MODELS, TOLERANCE, write


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("deepseek"), **MODELS["deepseek_v2"])


@pytest.mark.parametrize("tp", [1, 2])
def test_the_same_logits(path, tp, monkeypatch):
    """Few tokens visit all of them alike; of many the shared ones have GEMMs of their own."""
    appended, append = [], fused.FusedExperts.append

    def counted(self, *matrices):
        appended.append(append(self, *matrices))
        return appended[-1]

    monkeypatch.setattr(fused.FusedExperts, "append", counted)
    ids = tokens(60)
    (want,) = run_steps(path, [ids], tp=tp)
    assert not appended
    monkeypatch.setattr(load, "merges_experts", lambda *_: True)
    for rows in (0, 256):
        monkeypatch.setattr(moe, "SHARED_ROWS", rows)
        (got,) = run_steps(path, [ids], tp=tp)
        assert distance(got, want) < TOLERANCE
    assert appended and all(appended)


@pytest.mark.parametrize("width, biased, held", [(6, False, None), (8, True, None), (8, False, Held(0, 3, 6))])
def test_what_stays_apart(width, biased, held):
    """Shared experts that are no multiple of the others, and those beside biased or shared-out ones."""
    both = SimpleNamespace(matrices=torch.zeros(3, 8, 6), bias=torch.zeros(3, 8) if biased else None, in_host=False)
    one = SimpleNamespace(matrices=torch.zeros(3, 6, 4), inputs=whole(4), in_host=False)
    experts = SimpleNamespace(gate_up_proj=both, down_proj=one, held=held)
    assert not fused.FusedExperts.append(experts, torch.zeros(2 * width, 6), torch.zeros(6, width))
