"""A live job whose layers are in host memory: greedy tokens as with all on the device."""

import random

import pytest

from ..checkpoints import make_checkpoint
from ..engine import Engine, greedy

pytestmark = pytest.mark.timeout(240)

PROMPTS = {str(i): ([random.Random(i).randrange(3, 512) for _ in range(20 + 9 * i)], greedy(20)) for i in range(3)}
OPTIONS = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("layers") / "ckpt", tokenizer=False)


def answers(checkpoint, ranks=1, **options):
    with Engine(checkpoint, ranks, **OPTIONS, **options) as engine:
        outputs = engine.generate(PROMPTS)
        assert engine.drain() == 0
        return {name: one.tokens for name, one in outputs.items()}, engine.log()


@pytest.fixture(scope="module")
def expected(checkpoint):
    return answers(checkpoint)[0]


@pytest.mark.parametrize(
    "tp, pp",
    [(1, 1), *(pytest.param(*one, marks=pytest.mark.long) for one in ((2, 1), (1, 2), (2, 2)))],
)
def test_tokens(checkpoint, expected, tp, pp):
    got, log = answers(checkpoint, tp * pp, tp=tp, pp=pp, cpu_offload_gb=1)
    assert got == expected
    layers = 4 // pp
    assert f"{layers} of {layers} layers" in log
    assert "a last resort" in log
