"""Checkpoints of 16 bits on CPUs that compute in f32: they stay as they are, and make what they make in f32."""

import functools
import json

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.cpp import ops
from phalanx.rank.model.choices import choose_plain
from phalanx.rank.model.config import read_config
from phalanx.rank.model.experts.fused import StackedLinear
from phalanx.rank.model.experts.offload import OffloadOptions
from phalanx.rank.model.formats import DENSE
from phalanx.rank.model.formats._plain import HalfFloats
from phalanx.rank.model.load import load
from safetensors.torch import load_file, save_file

from .. import test_architectures as architectures
from ..harness import distance, run_steps, tokens
from .test_q8_0 import COMMON
from .test_q8_0 import MODELS as OWN

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
MODELS = {name: COMMON | OWN[name] for name in ("llama", "qwen2", "gemma2")}
# A linear that becomes plain; experts; those of one tensor, inputs before outputs, gate and up in turn, with biases.
MODELS |= {name: architectures.MODELS[name] for name in ("deepseek_v2", "qwen3_moe", "gpt_oss")}


def narrow(path, dtype, kept=()):
    """The checkpoint's matrices in 16 bits, but those whose names end so."""
    file, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    weights = load_file(file)
    small = {name: x if name.endswith(tuple(kept)) and kept else x.to(dtype) for name, x in weights.items()}
    save_file(small, file)
    (path / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    @functools.cache
    def make(name, dtype):
        return narrow(architectures.write(tmp_path_factory.mktemp(name) / "small", **MODELS[name]), dtype)

    return make


def load_on(path, tp=1, **options):
    return threads.run(lambda comm: load(path, mesh.build(comm, tp, 1), **options), tp)


@pytest.mark.sample(5)
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_weights_in_f32(made, name, dtype, tp, pp):
    path, ids = made(name, dtype), tokens(90, vocab=500)
    steps = [[(0, 70)], *[[(0, 1)]] * 20]  # many rows at once, and one
    mine, wide = (run_steps(path, [ids], steps, tp=tp, pp=pp, dtype=d, max_model_len=512)[0] for d in ("auto", "f32"))
    assert distance(mine, wide) < 1e-5


def test_what_is_held(made):
    (model,), (wide,) = (load_on(made("llama", torch.bfloat16), dtype=d) for d in ("auto", "f32"))
    matrices = ((4 * 96 * 192 + 3 * 96 * 320) * 2 + 2 * 509 * 96) * 2
    assert wide.weight_bytes - model.weight_bytes == matrices  # half of what they take in f32, the embedding too
    assert model.num_weights == wide.num_weights and model.dtype == torch.float32
    kept = [one.kept_bytes(torch.float32, torch.device("cpu")) for one in model.sharded_modules()]
    assert model.weight_bytes == sum(kept)
    (tied,) = load_on(made("gemma2", torch.bfloat16))
    head, table = tied.lm_head.parts[0].packed.weight, tied.model.embed_tokens.part.packed.weight
    assert head is table and table.dtype == torch.bfloat16  # a tied head has the embedding's table
    (wide,) = load_on(made("gemma2", torch.bfloat16), dtype="f32")
    assert wide.weight_bytes - tied.weight_bytes == ((4 * 96 * 192 + 3 * 96 * 320) * 2 + 509 * 96) * 2


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_take_half(made, tmp_path, name):
    (model,), (wide,) = (load_on(made(name, torch.bfloat16), dtype=d) for d in ("auto", "f32"))
    kept, stacks = 0, [one for one in model.modules() if isinstance(one, StackedLinear)]
    for one in stacks:
        assert one.matrices.dtype == torch.bfloat16 and one.matrices.is_contiguous()
        kept += one.kept_bytes(torch.float32, torch.device("cpu"))
    linears = sum(one.num_weights for one in stacks)
    assert stacks and kept == linears * 2 + sum(0 if one.bias is None else one.bias.nbytes for one in stacks)
    assert model.num_weights == wide.num_weights and wide.weight_bytes - model.weight_bytes > linears * 2
    some = "experts.gate_up_proj" if name == "gpt_oss" else "experts.0.gate_proj.weight"
    path = narrow(architectures.write(tmp_path / "mixed", **MODELS[name]), torch.bfloat16, [some])
    (mixed,) = load_on(path)
    dtypes = {one.matrices.dtype for one in mixed.modules() if isinstance(one, StackedLinear)}
    assert dtypes == {torch.bfloat16, torch.float32}  # stacks of which the checkpoint has a tensor in f32 are f32


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_in_host_memory(made, name):
    ids = tokens(40, vocab=500)
    steps = [[(0, 20)], *[[(0, 1)]] * 20]
    (want,) = run_steps(made(name, torch.bfloat16), [ids], steps, dtype="f32", max_model_len=512)
    for placement in ("auto", "cpu", "stream"):
        room = OffloadOptions(offload=2, placement=placement)
        (got,) = run_steps(made(name, torch.bfloat16), [ids], steps, dtype="auto", max_model_len=512, experts=room)
        assert distance(got, want) < 1e-5, placement


def test_a_matrix_that_is_stored_in_f32_stays_in_f32(tmp_path):
    name = "model.layers.1.mlp.down_proj"
    path = narrow(architectures.write(tmp_path / "mixed", **MODELS["llama"]), torch.bfloat16, [f"{name}.weight"])
    (model,) = load_on(path)
    kept = model.get_submodule(name).matrix
    assert kept.dtype == torch.float32 and torch.equal(kept, load_file(path / "model.safetensors")[f"{name}.weight"])
    assert model.get_submodule("model.layers.0.mlp.down_proj").matrix is None


@pytest.mark.parametrize("dtype, device, compiled, stored", [
    ("f32", "cpu", True, "BF16"),
    ("bf16", "cpu", True, "BF16"),
    ("auto", "cuda", True, "BF16"),
    ("auto", "cpu", False, "BF16"),
    ("auto", "cpu", True, "F32"),
])  # fmt: skip
def test_who_has_plain_weights(made, dtype, device, compiled, stored):
    config = read_config(made("llama", torch.bfloat16))
    of = choose_plain(dtype, config, torch.device(device), compiled, {"x.weight": stored})
    assert of("x") is DENSE
    kept = choose_plain("auto", config, torch.device("cpu"), True, {"x.weight": "BF16"})
    assert kept("x") == HalfFloats(torch.bfloat16) == kept("y"), "neighbours become one part"
