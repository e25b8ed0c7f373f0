"""A live job whose experts are in host memory: greedy tokens as with all on the device, by every way to serve one."""

import functools
import random

import pytest

from ..engine import Engine, greedy
from .model.test_architectures import MODELS, write

pytestmark = pytest.mark.timeout(300)

COUNT = 20
PROMPTS = [[random.Random(i).randrange(3, 512) for _ in range(20 + 9 * i)] for i in range(3)]
OPTIONS = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("experts"), **MODELS["qwen3_moe"])


def answers(checkpoint, ranks=1, **options):
    """The tokens of each prompt, what the ranks logged, and their figures."""
    with Engine(checkpoint, ranks=ranks, **OPTIONS, **options) as engine:
        outputs = engine.generate({str(i): (prompt, greedy(COUNT)) for i, prompt in enumerate(PROMPTS)})
        stats = engine.rest()
        assert engine.drain() == 0
        return [outputs[str(i)].tokens for i in range(len(PROMPTS))], engine.log(), stats


@pytest.fixture(scope="module")
def expected(checkpoint):
    return functools.cache(lambda: answers(checkpoint)[0])


@pytest.mark.parametrize(
    "way, offload",
    [
        ("auto", 5),
        pytest.param("auto", 100, marks=pytest.mark.long),
        pytest.param("cpu", 100, marks=pytest.mark.long),
        pytest.param("stream", 100, marks=pytest.mark.long),
        pytest.param("resident", 5, marks=pytest.mark.long),
    ],
)
def test_each_way(checkpoint, expected, way, offload):
    got, log, stats = answers(checkpoint, num_experts_offload_per_rank=offload, expert_placement=way)
    assert got == expected()
    assert f"experts: 10 a layer in host memory, 0.00 GB a rank; {max(0, 10 - offload)} of them resident" in log
    served = {"resident": stats.experts_resident, "cpu": stats.experts_cpu, "stream": stats.experts_streamed}
    if way == "auto":
        assert bool(served["resident"]) == (offload == 5) and served["cpu"] + served["stream"] > 0
    else:
        assert served[way] > 0
        assert way == "resident" or sum(served.values()) == served[way]


@pytest.mark.long
@pytest.mark.parametrize("tp, pp, ep", [(2, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2)])
def test_ranks(checkpoint, expected, tp, pp, ep):
    got, log, stats = answers(checkpoint, tp * pp, tp=tp, pp=pp, ep=ep, num_experts_offload_per_rank=3)
    assert got == expected() and "in host memory" in log
    assert stats.experts_resident > 0 and stats.experts_cpu + stats.experts_streamed > 0
