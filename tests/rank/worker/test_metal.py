"""`--device mps` by a stand-in for Metal (tests/metal), which PyTorch's CPU backend computes: no Mac has run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from phalanx.errors import FatalError
from phalanx.rank import protocol
from phalanx.rank.model.drafts import find
from phalanx.rank.worker import kv_cache

from ... import gguf_files
from ...checkpoints import make_checkpoint
from ...engine import Engine

pytestmark = pytest.mark.timeout(700)  # PyTorch starts twice on a machine that others use
STAND_IN = Path(__file__).parents[2] / "metal"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Linears' inputs are whole groups of all types."""
    return make_checkpoint(tmp_path_factory.mktemp("whole"), hidden_size=768, intermediate_size=256)


def compared(model, **options):
    command = [sys.executable, str(STAND_IN / "compare.py"), str(model), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["requests"] == 16 and found["tokens"] > 50 and found["different"] == []
    return found["kinds"]


@pytest.mark.long
def test_tokens_are_those_of_cpus(checkpoint):
    """Drawn and greedy, with penalties, grammars, log-probabilities and drafts."""
    assert compared(checkpoint) == ["mps torch.float32"]


@pytest.mark.long
@pytest.mark.parametrize("isq", ["q4_0", "q6k"])
def test_weights_that_are_quantised_in_situ_become_plain(whole, isq):
    assert compared(whole, isq=isq) == ["mps torch.float32"]


@pytest.mark.long
def test_a_gguf_file_is_dequantised_as_it_is_loaded(whole, tmp_path):
    file = gguf_files.write(whole, tmp_path / "model.gguf", "Q8_0", tokenizer=gguf_files.tokenizer(whole))
    assert compared(file) == ["mps torch.float32"]


@pytest.mark.long
@pytest.mark.parametrize("cut", ["tp", "pp"])
def test_two_ranks_meet_in_host_memory(checkpoint, monkeypatch, cut):
    """Real ranks: the option's way through the launcher, and collectives over MPI."""
    asked = {
        "greedy": ([*range(10, 50)], protocol.SamplingParams(max_tokens=12, temperature=0)),
        "drawn": ([100, 3] * 30, protocol.SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=5)),
    }
    found = []
    for device in ("mps", "cpu"):
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(STAND_IN))
            with Engine(checkpoint, 2, device=device, **{cut: 2}) as engine:
                found.append({name: (one.error, one.tokens) for name, one in engine.generate(asked).items()})
                assert engine.drain() == 0
    assert found[0] == found[1] and all(not error and tokens for error, tokens in found[0].values())


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="a Mac")
def test_other_machines_refuse(checkpoint):
    with pytest.raises(AssertionError, match="--device cpu"):
        Engine(checkpoint, device="mps")


def test_the_cache_has_what_metal_and_the_host_have(monkeypatch):
    gib = 1 << 30
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 48 * gib)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 8 * gib)
    monkeypatch.setattr(kv_cache, "PROC", Path(os.devnull))
    for free, want in ((60 * gib, 20 * gib), (10 * gib, 5 * gib)):
        monkeypatch.setattr(kv_cache.linux_calls, "host_memory", lambda free=free: (64 * gib, free))
        assert kv_cache.free_memory(torch.device("mps"), 2) == want


@pytest.mark.parametrize("kind, draft", [("mtp", ""), ("eagle3", "heads"), ("auto", "small")])
def test_models_do_not_draft(checkpoint, kind, draft):
    wanted = find.Wanted(kind, draft, "f32", "auto", "auto", "none", "auto")
    with pytest.raises(FatalError, match="mps"):
        find.kind_of(wanted, torch.device("mps"))
    assert find.kind_of(wanted._replace(speculate="ngram", draft_model=""), torch.device("mps")) == ""
