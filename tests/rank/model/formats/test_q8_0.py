"""Models quantised to Q8_0 while they are loaded: the logits of the dequantised weights, however the model is cut."""

import functools
import weakref

import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.quantized.int8_codes import q8_0
from phalanx.kernels.quantized.linear import dequantize
from phalanx.rank.gguf.mixes import Sizes
from phalanx.rank.model import measure
from phalanx.rank.model.config import read_config
from phalanx.rank.model.formats import find, in_situ
from phalanx.rank.model.load import load
from phalanx.rank.model.shard import whole
from phalanx.rank.model.weights import striped
from phalanx.rank.model.weights.slicing import Source
from safetensors.torch import load_file

from ....kernels.quantized import layouts
from ...reference import Reference
from ..harness import distance, reference_logits, run_steps, tokens
from ..test_architectures import write

TOLERANCE = 1e-4
# Heads of 32 dimensions, so that a tensor group of 6 cuts none of them; 320 is ten groups, which 3 does not divide.
COMMON = dict(
    hidden_size=96, intermediate_size=320, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6,
    head_dim=32, vocab_size=509, max_position_embeddings=512, bos_token_id=0, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
MODELS = {
    "llama": dict(model_type="llama"),
    "qwen2": dict(model_type="qwen2", hidden_size=192),  # biases
    "phi3": dict(model_type="phi3", hidden_size=192),  # qkv_proj and gate_up_proj whole
    "gemma2": dict(model_type="gemma2", query_pre_attn_scalar=24, sliding_window=11),  # tied
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> a checkpoint, and transformers' model of its weights as gguf-py's Q8_0 has them."""

    @functools.cache
    def make(name):
        path = write(tmp_path_factory.mktemp(name) / "plain", **COMMON | MODELS[name])
        return path, Reference(path, "q8_0").model

    return make


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_logits(made, name, tp, pp):
    (path, model), ids = made(name), tokens(60, vocab=509)
    steps = [[(0, 40)], *[[(0, 1)]] * 20]  # many rows at once, and one
    (logits,) = run_steps(path, [ids], steps, tp=tp, pp=pp, isq="q8_0", max_model_len=512)
    assert distance(logits, reference_logits(model, ids)) < TOLERANCE


def test_it_is_quantised(made, expected):
    path, ids = made("llama")[0], tokens(60, vocab=509)
    (logits,) = run_steps(path, [ids], isq="q8_0")
    assert 1e-3 < distance(logits, expected(path, ids)) < 0.2


def load_on(path, tp=1, pp=1, **options):
    return threads.run(lambda comm: load(path, mesh.build(comm, tp, pp), isq="q8_0", **options), tp * pp)


def weight(model, path="model.layers.1.mlp.down_proj"):
    """The weight that a linear multiplies with."""
    return dequantize(model.get_submodule(path).parts[0].packed)


def held(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", MODELS)
def test_striped_loading_makes_the_same_bits(made, monkeypatch, name, tp):
    monkeypatch.setattr(striped, "CHUNK", 3001)  # many rounds, and chunks that end within tensors
    for mine, others in zip(*(load_on(made(name)[0], tp, way=way) for way in ("striped", "direct")), strict=True):
        mine, others = held(mine), held(others)
        assert mine.keys() == others.keys() and sum("packed" in key for key in mine) == 9
        for key, one in mine.items():
            assert one.dtype == others[key].dtype and torch.equal(one, others[key]), key


def test_a_tensor_group_holds_the_codes_of_one_rank(made):
    """Cuts lie between groups: nothing is quantised in another way."""
    path = made("llama")[0]
    for options in ({}, {"load_format": "dummy"}):
        (whole,) = map(weight, load_on(path, **options))
        for tp in (2, 3):
            parts = torch.cat([weight(model) for model in load_on(path, tp, **options)], 1)
            assert torch.equal(whole, parts[:, :320]) and not parts[:, 320:].any()


def test_what_is_held(made):
    (model,) = load_on(made("gemma2")[0])
    head, table = model.lm_head.parts[0], model.model.embed_tokens.weight
    assert model.lm_head.matrix is None and table.dtype == torch.float32
    assert torch.equal(weight(model, "lm_head"), dequantize(q8_0.encode(table)))  # a tied head is the table's
    assert not any(one.is_floating_point() and one.dim() == 2 for one in head.parameters())
    linears = (4 * 96 * 192 + 3 * 96 * 320) * 2 + 509 * 96
    assert model.num_weights == linears
    plain = 4 * (509 * 96 + 96 * (4 * 2 + 1))
    assert model.weight_bytes - plain == pytest.approx(linears * 34 / 32, rel=0.01)


def test_weights_are_encoded_as_the_checkpoint_holds_them(made):
    """Not as the model's dtype rounds them."""
    path = made("llama")[0]
    stored = load_file(path / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert stored.dtype == torch.float32
    (model,) = load_on(path, dtype="bf16")
    assert torch.equal(weight(model), dequantize(q8_0.encode(stored)))
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_one_module_at_a_time_is_in_memory_unquantised(made, monkeypatch, tied):
    plain, most = [], []

    def encode(weight, real=q8_0.encode):
        plain.append(weakref.ref(weight.untyped_storage()))
        most.append(sum(one() is not None for one in plain))
        return real(weight)

    monkeypatch.setattr(q8_0, "encode", encode)
    (model,) = load_on(made("gemma2" if tied else "llama")[0])
    assert len(most) == 9 and set(most) == {1}
    alive = [one() for one in plain if one() is not None]
    assert len(alive) == tied, "the table"


@pytest.mark.parametrize("way, plain", [("direct", 3 * 192 * 96), ("striped", 4 * 192 * 96)])
def test_memory_that_loading_takes(made, way, plain):
    """The weights, and what is read but not encoded yet: of a file in alphabetical order o_proj lies within qkv."""
    path = made("llama")[0]
    model = measure.build(
        read_config(path), measure.GroupRank(0, 1), measure.GroupRank(0, 1), in_situ("q8_0", Sizes(1))
    )
    kept = sum(one.kept_bytes(torch.float32, torch.device("cpu")) for one in model.sharded_modules())
    need = kept + 4 * max(2 * 320 * 96, plain)
    load_on(path, way=way, room=need + (2 << 20) * (way == "striped"))  # which has buffers
    with pytest.raises(errors.FatalError, match="narrower.*--dtype.*--isq") as stopped:
        load_on(path, way=way, room=need - 1)
    assert stopped.value.code == errors.MEMORY


@pytest.mark.parametrize("sizes, tp, words", [
    (dict(intermediate_size=100), 1, "down_proj has 100 inputs, and q8_0 encodes groups of 32"),
    (dict(intermediate_size=352), 2, "each rank 176 of the 352 inputs of model.layers.0.mlp.down_proj"),
    (dict(intermediate_size=352), 2, "choose another --tp, or serve without --isq"),
])  # fmt: skip
def test_groups_that_cannot_be_whole(tmp_path, sizes, tp, words):
    path = write(tmp_path, model_type="llama", **COMMON | sizes)
    with pytest.raises(errors.FatalError) as stopped:
        load_on(path, tp)
    assert stopped.value.code == errors.USAGE and words in str(stopped.value)


def test_what_is_compiled_ahead_for_gpus():
    """Programs of a part as a GPU packs it; on CPUs there is nothing to compile for each size."""
    part = find("q8_0").part(whole(256), (whole(512),), False, (Source("up_proj"),))
    part.weight = torch.nn.Parameter(torch.randn(512, 256), requires_grad=False)
    part.finish()
    rest = "", torch.bfloat16, DeviceCaps(132, "sm_90a", True, True, True)
    assert list(part.variants([1, 16, 100], *rest)) == []
    part.packed = layouts.q8_0(*q8_0.encode(torch.randn(512, 256)))
    kernels = [variant.source for variant in part.variants([1, 16, 100], *rest)]
    assert kernels == ["quantized_gemm", "quantized_gemm", "quantized_wgmma"]
