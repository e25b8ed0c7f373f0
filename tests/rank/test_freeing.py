"""Live ranks whose layers have sliding windows: tokens are the same whether blocks behind them are freed or kept."""

import random
from pathlib import Path

import pytest

from ..engine import Engine, greedy
from .model.test_architectures import MODELS, write

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

SIZES = dict(head_dim=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=4)
OPTIONS = dict(max_model_len=160, max_num_seqs=4, max_num_batched_tokens=32)
FREEING = (str(Path(__file__).with_name("freeing.py")),)  # a program of ranks
COUNT = 60


def prompt(i):
    """Some begin alike."""
    draw = random.Random(i // 2)
    return [*(draw.randrange(3, 512) for _ in range(50)), i + 3]


def tokens(path, ranks=1, **options):
    """Generates for each prompt, twice; the tokens, and the engine's counts."""
    with Engine(path, ranks, program=FREEING, **OPTIONS, **options) as engine:
        found = []
        for turn in range(2):
            sent = {f"{turn}-{i}": (prompt(i), greedy(COUNT)) for i in range(6)}
            found.append([one.tokens for one in engine.generate(sent).values()])
        return found, engine.rest(), engine.ready.kv_tokens


# All layers with a window, every other one, and three of four with chunks
@pytest.mark.parametrize("name", ["mistral", "ministral", "llama4_text"])
def test_tokens_do_not_depend_on_what_is_freed(tmp_path, monkeypatch, name):
    path = write(tmp_path / "model", **MODELS[name] | SIZES)
    monkeypatch.setenv("FREES", "never")
    want, _, before = tokens(path, mem=4)
    monkeypatch.setenv("FREES", "yes")
    assert want[0] == want[1] and len({token for one in want[0] for token in one}) > 8
    found, stats, after = tokens(path, mem=4)
    assert found == want and after > 1.3 * before and stats.cached_tokens > 0
    for ranks in (dict(tp=2), dict(dp=2), dict(pp=2)):
        found, stats, _ = tokens(path, 2, mem=2, kvcache_mem_cpu=8, **ranks)
        assert found == want, ranks
    found, stats, _ = tokens(path, mem=1, kvcache_mem_cpu=8)
    assert found == want and stats.host_loads > 0
