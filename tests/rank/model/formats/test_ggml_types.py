"""Models quantised to ggml's other types while they are loaded: the logits of the dequantised weights."""

import weakref

import gguf
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank.gguf.mixes import MIXES
from phalanx.rank.model.formats import find
from phalanx.rank.model.load import load
from phalanx.rank.options import IN_SITU, ISQ_SPELLINGS

from ...reference import Reference
from ..harness import distance, reference_logits, run_steps, tokens
from ..stored_formats.test_stored import check_greedy
from ..test_architectures import write

TYPES = [name for name in IN_SITU if name.startswith("q") and name not in ("q8_0", *MIXES)]
# Two ranks get 256 inputs each of what is cut.
SIZES = dict(
    model_type="llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=128, vocab_size=509, max_position_embeddings=512,
)  # fmt: skip


def codec(name):
    return find(name).codec


def through(weight, name):
    """A weight as gguf-py dequantises what is encoded here, or there where it encodes the type."""
    kind = gguf.GGMLQuantizationType[name.upper() if "_" in name else f"{name[:2].upper()}_K"]
    if "_" in name:
        blocks = gguf.quants.quantize(weight.float().numpy(), kind)
    else:
        (blocks,) = (one.numpy() for one in codec(name).encode(weight.float()))
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("plain"), **SIZES)


def test_all_are_here():
    assert TYPES == ["q2k", "q3k", "q4_0", "q4_1", "q4k", "q5_0", "q5_1", "q5k", "q6k"]
    assert ISQ_SPELLINGS["Q4_K"] == ISQ_SPELLINGS["q4_k"] == ISQ_SPELLINGS["Q4K"] == "q4k"
    assert ISQ_SPELLINGS["Q4_K_M"] == ISQ_SPELLINGS["q4_k_m"] == "q4km"


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TYPES)
def test_logits(path, name, tp):
    truth, ids = Reference(path), tokens(60, vocab=509)
    plain = reference_logits(truth.model, ids)
    for module in truth.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(through(module.weight.detach(), name))
    steps = [[(0, 40)], *[[(0, 1)]] * 20]  # many rows at once, and one
    (logits,) = run_steps(path, [ids], steps, tp=tp, isq=name, max_model_len=512)
    assert distance(logits, reference_logits(truth.model, ids)) < 3e-4
    assert distance(logits, plain) > 3e-3, "it is quantised"


@pytest.mark.long
@pytest.mark.parametrize("name", TYPES)
def test_greedy_tokens_of_three_ranks(tmp_path, name):
    """Each rank has a super-block of 256 inputs of what is cut."""
    sizes = dict(hidden_size=768, num_attention_heads=6, num_key_value_heads=3, intermediate_size=768)
    path = write(tmp_path, **SIZES | sizes)
    truth = Reference(path)
    for module in truth.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(through(module.weight.detach(), name))
    check_greedy(path, truth, name, tp=3, tolerance=3e-4)


def test_linears_without_whole_super_blocks_take_smaller_groups(path, tmp_path, caplog):
    caplog.set_level("INFO", "phalanx")
    (model,) = threads.run(lambda comm: load(path, mesh.build(comm, 1, 1), isq="q4k"), 1)
    whole = model.weight_bytes
    assert not any("not whole groups" in said for said in caplog.messages)
    narrow = write(tmp_path, **SIZES | dict(intermediate_size=480))
    (model,) = threads.run(lambda comm: load(narrow, mesh.build(comm, 1, 1), isq="q4k"), 1)
    said = [one for one in caplog.messages if "not whole groups" in one]
    (line,) = said
    assert "--isq q4k: 2 linears" in line and "q5_0" in line
    names = {part.name for layer in model.model.layers.values() for part in layer.mlp.down_proj.parts}
    assert names == {"q5_0"} and model.weight_bytes < 1.2 * whole


@pytest.mark.parametrize("tp", [1, 2])
def test_a_mix(tmp_path, caplog, tp):
    """Four layers have the types that a file of llama.cpp's Q4_K_M has, on each rank, and the head in Q6_K."""
    caplog.set_level("INFO", "phalanx")
    path = write(tmp_path, **SIZES | dict(num_hidden_layers=4))
    models = threads.run(lambda comm: load(path, mesh.build(comm, tp, 1), isq="q4km"), tp)
    for model in models:
        layers = [layer for _, layer in sorted(model.model.layers.items())]
        names = [[[p.name for p in linear.parts] for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj,
                 layer.mlp.gate_up_proj, layer.mlp.down_proj)] for layer in layers]  # fmt: skip
        more, usual = [["q4k", "q6k"], ["q4k"], ["q4k"], ["q6k"]], [["q4k"], ["q4k"], ["q4k"], ["q4k"]]
        assert names == [usual, usual, more, more]  # the third of those between, and the last eighth
        assert [one.name for one in model.lm_head.parts] == ["q6k"]
    assert "--isq q4km: linears," in caplog.text


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("isq", ["q4k", "q4km", "fp8"])
def test_one_module_at_a_time_is_in_memory_unquantised(tmp_path, monkeypatch, isq, tied):
    """Compare Q8_0 (test_q8_0.py)."""
    plain, most = [], []
    for name in ("fp8",) if isq == "fp8" else ("q4k", "q6k"):
        real = codec(name).encode

        def encode(weight, *more, real=real):
            if not any(one() is weight.untyped_storage() for one in plain):
                plain.append(weakref.ref(weight.untyped_storage()))
            most.append(sum(one() is not None for one in plain))
            return real(weight, *more)

        monkeypatch.setattr(codec(name), "encode", encode)
    path = write(tmp_path, **SIZES, tie_word_embeddings=tied)
    (model,) = threads.run(lambda comm: load(path, mesh.build(comm, 1, 1), isq=isq), 1)
    assert len(most) >= 9 and set(most) == {1} and model.num_weights
    alive = [one() for one in plain if one() is not None]
    assert len(alive) == tied, "the table"
