"""Logits with a cache in e4m3 beside those without, over ranks, chunks and decoding steps."""

import pytest
import torch
from phalanx.launcher.builtin_model import DIRECTORY
from phalanx.rank.model.cache_spec import cache_dtype
from phalanx.rank.worker import kv_cache
from tokenizers import Tokenizer

from . import harness
from .harness import distance, run_steps, tokens
from .test_architectures import MODELS, write

STEPS = [[(0, 30)], [(0, 1), (1, 40)], [(0, 1), (1, 1)], [(0, 1), (1, 9)], [(0, 7), (1, 5)]]
SEQUENCES = [tokens(40), tokens(55, seed=1)]


def fp8_caches(model, blocks, rows=0):
    """With a code and a scale everywhere that no kernel writes, so that a read of them would show."""
    cpu = torch.device("cpu")
    caches = kv_cache.allocate(model.cache_specs(), blocks, harness.BLOCK, cache_dtype("fp8", model.dtype), cpu, rows)
    for tensor in (tensor for layer in caches for tensor in layer):
        tensor.view(torch.uint8).fill_(0xFE if tensor.dtype == torch.uint8 else 0x7F)
    return caches


@pytest.fixture
def fp8(monkeypatch):
    monkeypatch.setattr(harness, "nan_caches", fp8_caches)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    dense = {"deepseek_v3": dict(first_k_dense_replace=99)}  # a router's choice is no matter of distance
    return {
        name: write(tmp_path_factory.mktemp(name), **MODELS[name] | dense.get(name, {}))
        for name in ("mistral", "deepseek_v3")
    }


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3"])
def test_logits_are_near_those_without(made, name, monkeypatch):
    plain = run_steps(made[name], SEQUENCES, STEPS)
    monkeypatch.setattr(harness, "nan_caches", fp8_caches)
    found = run_steps(made[name], SEQUENCES, STEPS)
    for mine, other in zip(found, plain, strict=True):
        assert 0 < (mine - other).norm() < 0.08 * (other - other.mean(1, True)).norm()
    if name == "mistral":
        for tp, pp in ((2, 1), (1, 2)):
            cut = run_steps(made[name], SEQUENCES, STEPS, tp=tp, pp=pp)
            assert max(map(distance, cut, found)) < 0.1  # another order of sums moves a few codes
    else:
        cut = run_steps(made[name], SEQUENCES, STEPS, tp=2, pp=2)
        assert max(map(distance, cut, found)) < 0.1


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_models(made, fp8, dtype):
    found = run_steps(made["mistral"], SEQUENCES, STEPS, dtype=dtype)
    wide = run_steps(made["mistral"], SEQUENCES, STEPS, dtype="f32")
    for mine, other in zip(found, wide, strict=True):
        assert (mine - other).norm() < 0.08 * (other - other.mean(1, True)).norm()


def test_the_built_in_model_stays_itself(monkeypatch):
    """It continues a text as it does with a plain cache, and finds it as likely."""
    text = "The capital of France is Paris. The capital of Italy is Rome. Two plus two is four."
    ids = Tokenizer.from_file(f"{DIRECTORY}/tokenizer.json").encode(text).ids
    steps = [[(0, len(ids) - 6)], *[[(0, 1)]] * 6]
    (plain,) = run_steps(DIRECTORY, [ids], steps, max_model_len=512)
    monkeypatch.setattr(harness, "nan_caches", fp8_caches)
    (found,) = run_steps(DIRECTORY, [ids], steps, max_model_len=512)
    targets = torch.tensor(ids[1:])
    losses = [torch.nn.functional.cross_entropy(x[:-1].float(), targets) for x in (plain, found)]
    assert abs(losses[1] - losses[0]) < 0.02 * losses[0]
    assert (plain.argmax(1) == found.argmax(1)).float().mean() > 0.9
