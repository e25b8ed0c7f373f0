"""Live ranks with a KV cache that is too small and a second tier in host memory: tokens as with room for all."""

import random
from pathlib import Path

import pytest
from phalanx.rank import protocol

from ..checkpoints import make_checkpoint
from ..engine import Engine, greedy
from .model.test_architectures import MODELS, write

pytestmark = pytest.mark.timeout(300)

SIZES = dict(head_dim=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=4)  # a block takes 128 KiB
OPTIONS = dict(max_model_len=112, max_num_seqs=8, max_num_batched_tokens=64)
COUNT = 24
SWAPPING = (str(Path(__file__).with_name("swapping.py")),)  # a program of ranks


def prompt(i: int) -> list[int]:
    """A beginning of its own."""
    draw = random.Random(i)
    return [draw.randrange(3, 512) for _ in range(60)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("swap") / "ckpt", "qwen3", seed=3, tokenizer=False, **SIZES)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """The tokens of each prompt where nothing has to move."""
    with Engine(checkpoint, **OPTIONS) as engine:
        outputs = engine.generate({str(i): (prompt(i), greedy(COUNT)) for i in range(6)})
        assert engine.rest().preemptions == 0
    return {name: one.tokens for name, one in outputs.items()}


@pytest.mark.parametrize(
    "tp, pp", [(1, 1), pytest.param(2, 1, marks=pytest.mark.long), pytest.param(1, 2, marks=pytest.mark.long)]
)
def test_tokens_are_the_same_and_blocks_come_back(checkpoint, expected, tp, pp):
    """Six sequences of six blocks each, in a pool of 8 or 16."""
    with Engine(checkpoint, tp * pp, program=SWAPPING, tp=tp, pp=pp, mem=1, kvcache_mem_cpu=8, **OPTIONS) as engine:
        assert "host memory" in engine.log()
        for turn in range(2):
            sent = {f"{turn}-{i}": (prompt(i), greedy(COUNT)) for i in range(6)}
            if turn:  # an abort, of a sequence that may be swapped out
                sent["gone"] = prompt(7), greedy(48)
            engine.send(*(protocol.Request(n, protocol.pack_u32(p), s) for n, (p, s) in sent.items()))
            if turn:
                engine.send(protocol.Abort(["gone"]))
                del sent["gone"]
            outputs = engine.collect(sent)
            assert {name[2:]: one.tokens for name, one in outputs.items()} == expected
        stats = engine.rest()
        assert stats.preemptions > 0 and stats.swapped_in > 0 and stats.host_loads > 0
        assert stats.host_stores >= stats.host_blocks_used > 0
        assert min(one.cached for one in outputs.values()) == 48  # of the second turn, all but a prompt's last block
        assert engine.drain() == 0


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """A model that caches latents, with blocks as large as above."""
    sizes = dict(kv_lora_rank=480, qk_rope_head_dim=32, num_hidden_layers=4)
    return write(tmp_path_factory.mktemp("latents"), **MODELS["deepseek_v3"] | sizes)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """A model that caches index keys beside latents, and attends to fewer tokens than the prompts have."""
    sizes = dict(kv_lora_rank=416, qk_rope_head_dim=32, index_head_dim=64)
    return write(tmp_path_factory.mktemp("indexed"), **MODELS["deepseek_v32"] | sizes)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, dtype",
    [("checkpoint", "fp8"), ("latents", "auto"), ("latents", "fp8"), ("indexed", "auto"), ("indexed", "fp8")],
)
def test_other_caches(request, kind, dtype):
    """FP8 and latents. Eight sequences of six blocks, in a pool of 8 or 32: tokens as with room for all."""
    path = request.getfixturevalue(kind)
    sent = {str(i): (prompt(i), greedy(COUNT)) for i in range(8)}
    tokens = []
    for room in (dict(), dict(mem=1, kvcache_mem_cpu=8)):
        with Engine(path, program=SWAPPING, kv_cache_dtype=dtype, **room, **OPTIONS) as engine:
            outputs = engine.generate(sent)
            tokens.append({name: one.tokens for name, one in outputs.items()})
            stats = engine.rest()
            assert bool(stats.preemptions) == bool(stats.swapped_in) == bool(room)
            assert engine.drain() == 0
    assert tokens[0] == tokens[1]


@pytest.mark.long
def test_more_host_memory_than_there_is(checkpoint):
    with pytest.raises(AssertionError, match="--kvcache-mem-cpu.*asks"):
        Engine(checkpoint, kvcache_mem_cpu=1 << 40, **OPTIONS)
