"""The figures of `phalanx fit` against ranks that really load: weights, cache, and the constants of their rooms."""

import msgspec
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.gemm import linear
from phalanx.launcher.commands.fit import devices, memory, model_shapes, plan
from phalanx.launcher.commands.fit.memory import Layout, Workload
from phalanx.rank import __main__ as program
from phalanx.rank.model import config as rank_config
from phalanx.rank.model.load import load
from phalanx.rank.worker import kv_cache

from ...checkpoints import make_checkpoint

TOKENS = 4096
LAYOUTS = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    common = {"hidden_size": 384, "head_dim": 32, "intermediate_size": 500, "vocab_size": 517, "num_hidden_layers": 5}
    return {
        "llama": make_checkpoint(place / "llama", "llama", tokenizer=False, **common),
        "qwen3": make_checkpoint(place / "qwen3", "qwen3", tokenizer=False, tie_word_embeddings=True, **common),
        "biased": make_checkpoint(
            place / "biased", "llama", tokenizer=False, attention_bias=True, mlp_bias=True, num_key_value_heads=2
        ),
        "narrow": make_checkpoint(place / "narrow", "qwen3", tokenizer=False, tie_word_embeddings=True),
    }


def live(path, tp, pp, dtype):
    """What each rank of a job reports and allocates: weights, rope table, KV cache for TOKENS; by rank."""

    def rank(world):
        model = load(path, mesh.build(world, tp, pp), "cpu", dtype, max_model_len=512)
        spec = model.kv_spec
        blocks = TOKENS // program.BLOCK_SIZE
        caches = kv_cache.allocate(
            spec.layers, blocks, program.BLOCK_SIZE, spec.kv_heads, spec.head_dim, model.dtype, torch.device("cpu")
        )
        return model.weight_bytes, model.rope.table.nbytes, sum(k.nbytes + v.nbytes for k, v in caches)

    return threads.run(rank, tp * pp)


@pytest.fixture(params=[1, 2], ids=["one-core", "cores"])
def packs(request):
    """Whether a rank with so many cores keeps large f32 matrices packed, a tied head as one of its own then."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield devices.cpu(msgspec.structs.replace(devices.TYPICAL, cores=request.param), 1, 1e9, "").packs
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["llama", "qwen3", "biased", "narrow"])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS, ids=[f"tp{tp}-pp{pp}" for tp, pp in LAYOUTS])
def test_bytes_of_live_ranks(checkpoints, packs, name, tp, pp):
    """Asked for 5 %; the arithmetic is exact."""
    shape = model_shapes.read(checkpoints[name])
    if tp not in shape.tensor_degrees():
        pytest.skip("its heads do not allow it")
    for dtype in ("f32", "bf16"):
        asked = Workload(context=512, concurrency=8, length=256, dtype=dtype)
        stages = memory.stages(shape, Layout(tp, pp), asked, packs)
        for rank, (weights, rope, kv) in enumerate(live(checkpoints[name], tp, pp, dtype)):
            stage = stages[pp - 1 - rank // tp]  # rank 0 is on the last stage
            assert stage.loaded == pytest.approx(weights, rel=0.05)
            assert (stage.loaded, stage.rope, stage.kv_token * TOKENS) == (weights, rope, kv)


def test_the_degrees_are_the_ranks(checkpoints):
    for path in checkpoints.values():
        shape, config = model_shapes.read(path), rank_config.read_config(path)
        assert shape.tensor_degrees() == rank_config.tensor_degrees(config.num_heads, config.num_kv_heads)
        assert shape.max_positions == config.max_positions
        assert shape.unserved == ""


def test_the_constants_are_the_ranks():
    assert memory.BLOCK == program.BLOCK_SIZE
    assert {True: kv_cache.FRACTION["cpu"], False: kv_cache.FRACTION["cuda"]} == memory.FRACTION
    assert {True: program.TOKEN_BUDGET["cpu"], False: program.TOKEN_BUDGET["cuda"]} == plan.BUDGET
    assert memory.PACK_FROM == linear.PACK_FROM


def test_every_architecture_is_known():
    """Who adds an architecture adds its arithmetic."""
    from phalanx.rank.model.architectures import supported

    assert set(supported()) <= set(model_shapes.FAMILIES)
