"""Experts in FP8, each in tensors of its own: logits of the dequantised weights, however the model is cut."""

import functools
from types import SimpleNamespace

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.cpp import ops
from phalanx.kernels.quantized import e4m3, e4m3_cpu, gpu_layout
from phalanx.kernels.quantized.stack import stack
from phalanx.rank.model.experts.fused import StackedLinear
from phalanx.rank.model.load import load
from phalanx.rank.model.shard import Shard, even, whole
from phalanx.rank.model.stored_formats.fp8 import ExpertStack, Scheme

from ..harness import distance, run_steps, tokens
from ..test_architectures import MODELS, write
from . import packers
from .test_stored import TOLERANCE, compressed_floats, fp8

MIXED = dict(hidden_size=192, moe_intermediate_size=152, intermediate_size=200, num_hidden_layers=3, vocab_size=509)
CASES = {
    "blocks": (fp8(), MODELS["qwen3_moe"] | MIXED),
    "blocks, with a shared expert": (
        fp8((64, 64)), MODELS["qwen2_moe"] | MIXED | dict(shared_expert_intermediate_size=100),
    ),
    "one scale": (fp8(None), MODELS["mixtral"] | dict(hidden_size=96, intermediate_size=80, vocab_size=509)),
    "one scale, by its other name": (
        (packers.fp8(None), fp8(None)[1]),
        MODELS["mixtral"] | dict(hidden_size=96, intermediate_size=80, vocab_size=509),
    ),
    "blocks, with latent attention": (fp8((32, 32)), MODELS["deepseek_v3"]),
    "blocks, renamed": (fp8((32, 32)), MODELS["minimax_m2"]),
    "channels": (compressed_floats((1, 0), strategy="channel"), MODELS["qwen3_moe"] | MIXED),
}  # fmt: skip
PLAIN = "mlp.gate.", "moe.gate.", "shared_expert_gate", "self_attn.v_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    @functools.cache
    def make(name):
        (pack, settings), options = CASES[name]
        settings = settings | {"modules_to_not_convert": ["gate", "shared_expert_gate", "model.layers.*.v_proj"]}
        folder = tmp_path_factory.mktemp("fp8")
        packers.quantise(write(folder / "source", **options), folder, pack, settings, PLAIN)
        return folder / "quantised", folder / "plain"

    return make


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp, pp", [(1, 1), pytest.param(2, 1, marks=pytest.mark.long), (3, 2)])
@pytest.mark.parametrize("name", CASES)
def test_logits(made, expected, name, tp, pp):
    (path, plain), ids = made(name), tokens(40, vocab=509)
    (logits,) = run_steps(path, [ids], [[(0, 30)], *[[(0, 1)]] * 10], tp=tp, pp=pp, max_model_len=512)
    assert distance(logits, expected(plain, ids)) < TOLERANCE


def loaded(path, tp, **options):
    return threads.run(lambda world: load(path, mesh.build(world, tp, 1), **options), tp)


def stacks(model):
    return [one for one in model.modules() if isinstance(one, StackedLinear)]


def test_striped_loading_and_memory(made, caplog):
    path = made("blocks")[0]
    direct, striped = (stacks(loaded(path, 2, way=way)[1]) for way in ("direct", "striped"))
    for one, other in zip(direct, striped, strict=True):
        assert torch.equal(one.packed.plain(torch.float32), other.packed.plain(torch.float32))
        held = sum(x.nbytes for x in one.buffers())
        assert held == one.kept_bytes(torch.float32, torch.device("cpu"))
    assert not any("not used" in record.message for record in caplog.records)
    (logits,) = run_steps(path, [tokens(9, vocab=509)], load_format="dummy", max_model_len=64)
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize(
    "ranks, gate_up, down",
    [
        (1, 8.25, 8.25),
        (8, 8.25, 9),  # 96 inputs of down, of which 32 share a scale
        (16, 0, 0),  # 48, of which 16 do: both become plain
    ],
)
def test_gpus_have_gate_up_and_down_packed_or_neither(ranks, gate_up, down):
    stored, hidden = ExpertStack(Scheme("weight_scale_inv", 128, 128)), whole(2048)
    for rank in range(ranks):
        inner = even(768, rank, ranks)
        up = SimpleNamespace(inputs=hidden, outputs=(inner, inner), width=2 * inner.width)
        back = SimpleNamespace(inputs=inner, outputs=(hidden,), width=hidden.width)
        for one, bits in ((up, gate_up), (back, down)):
            assert stored.becomes_plain(one, torch.device("cuda")) is not bool(bits)
            assert not stored.becomes_plain(one, torch.device("cpu"))
            assert stored.kept_bits(one, torch.device("cuda")) == bits


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
@pytest.mark.parametrize(
    "inputs, outputs, bits",
    [
        (256, 32, 8.25),
        (192, 32, 9),  # 64 inputs share a scale: in pieces of 32
        (192, 20, 9 * 32 / 20),
    ],
)
def test_a_slot_has_room_for_what_gpus_make_of_host_memory(inputs, outputs, bits):
    """Blocks of 128 x 128 are divided by cuts between ranks."""
    scheme, shard, cuda = Scheme("weight_scale_inv", 128, 128), Shard(768, inputs, inputs), torch.device("cuda")
    unit = scheme.unit(shard)
    made = stack(
        e4m3, lambda _: (torch.zeros(outputs, inputs, dtype=torch.uint8), torch.ones(outputs, inputs // unit)),
        (3, outputs, inputs),
    )  # fmt: skip
    assert isinstance(made.packed, e4m3_cpu.Packed)
    held = sum(x.nbytes for x in gpu_layout.parts(gpu_layout.repack_for_gpu(made)).tensors)
    assert held == 3 * outputs * inputs * bits / 8
    layer = SimpleNamespace(inputs=shard, outputs=(whole(64),), width=outputs)
    assert ExpertStack(scheme).kept_bits(layer, cuda) == bits
