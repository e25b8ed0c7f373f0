"""GGUF files load as the checkpoints that they were made of, and quantised ones as gguf-py dequantises them."""

import functools
import itertools
import json

import gguf
import numpy as np
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.cpp import ops
from phalanx.kernels.quantized.ggml import CODECS
from phalanx.rank.gguf import architectures
from phalanx.rank.model.formats._plain import HalfFloatsPart as HalfFloats
from phalanx.rank.model.load import load
from phalanx.rank.model.weights import safetensors, striped
from safetensors.torch import load_file, save_file

from ... import gguf_files
from ..reference import Reference
from .harness import distance, run_steps, tokens
from .shapes import DEEPSEEK_YARN, MODELS
from .stored_formats.test_stored import check_greedy
from .test_architectures import first_of_each_class, of_short, write

# Files say less than config.json: of some nothing of windows, activations, and dense layers between those with experts.
MODELS = {
    "llama": dict(model_type="llama"),
    "qwen3": dict(model_type="qwen3", head_dim=16),
    "qwen2": dict(model_type="qwen2"),
    "gemma2": MODELS["gemma2"] | dict(query_pre_attn_scalar=16),
    "gemma3_text": MODELS["gemma3_text"] | dict(query_pre_attn_scalar=16),
    "qwen2_moe": MODELS["qwen2_moe"] | dict(use_sliding_window=False, mlp_only_layers=[]),
    "qwen3_moe": MODELS["qwen3_moe"] | dict(decoder_sparse_step=1),
    "mixtral": dict(model_type="mixtral", num_local_experts=6, num_experts_per_tok=2),
    "gpt_bigcode": MODELS["gpt_bigcode"] | dict(activation_function="gelu_pytorch_tanh"),
    "starcoder2": dict(model_type="starcoder2", sliding_window=None),
    "deepseek_v2": MODELS["deepseek_v2"] | dict(rope_parameters=DEEPSEEK_YARN | dict(mscale=0.7)),
    "deepseek_v2 in groups": MODELS["deepseek_v2 in groups"] | dict(attention_bias=False),
    "deepseek_v3": MODELS["deepseek_v3"] | dict(rope_parameters=DEEPSEEK_YARN | dict(mscale=0.7)),
    "olmo3": MODELS["olmo3"] | dict(max_position_embeddings=256),
    "gpt_oss": MODELS["gpt_oss"] | dict(max_position_embeddings=128, head_dim=16),
    "ministral3": MODELS["ministral3"] | dict(max_position_embeddings=256),
    "gpt_oss few keys": MODELS["gpt_oss few keys"] | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "dots1": MODELS["dots1"] | dict(sliding_window=None),
    "llama4_text": MODELS["llama4_text"] | dict(
        attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1, rope_parameters=dict(rope_theta=1e4),
    ),
    "ernie4_5_moe in some": MODELS["ernie4_5_moe in some"] | dict(moe_layer_end_index=-1),
    "hunyuan_v1_moe": MODELS["hunyuan_v1_moe"] | dict(moe_topk=3),
    "granitemoehybrid dense": MODELS["granitemoehybrid dense"] | dict(
        mamba_proj_bias=False, position_embedding_type=None, attention_bias=False,
    ),
    "mistral4": MODELS["mistral4"] | dict(
        rope_parameters=DEEPSEEK_YARN | dict(
            mscale=0.7, llama_4_scaling_beta=0.1, original_max_position_embeddings=16,
        ),
    ),
    "cohere normed": MODELS["cohere normed"] | dict(tie_word_embeddings=True),
    "olmo clipped": MODELS["olmo clipped"] | dict(attention_bias=False),
    "falcon_h1 gated first": MODELS["falcon_h1 gated first"] | dict(mlp_bias=False),
    "kimi_linear": MODELS["kimi_linear"] | dict(mlp_layer_types=["dense", *["sparse"] * 3]),
    "kimi_linear published": MODELS["kimi_linear published"] | dict(
        num_expert_group=1, topk_group=1, moe_renormalize=True,
    ),
    "exaone4": MODELS["exaone4"] | dict(sliding_window_pattern=4),
    "apertus": dict(model_type="apertus", rope_parameters=dict(rope_type="default", rope_theta=1e4)),
} | {
    name: MODELS[name]
    for name in (
        "gemma", "phi", "phi3", "phi3 partial", "stablelm", "stablelm parallel", "glm", "glm rotated whole", "glm4",
        "glm4_moe", "glm4_moe plain", "granite", "olmo2", "cohere2", "smollm3", "minimax_m2", "minimax_m2 few keys",
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "ernie4_5", "ernie4_5 biased", "arcee", "arcee biased",
        "seed_oss", "seed_oss other biases", "glm_moe_dsa", "granitemoe", "nemotron", "olmoe", "ernie4_5_moe",
        "hunyuan_v1_dense", "hunyuan_v1_dense biased", "lfm2", "lfm2_moe",
        "granitemoehybrid", "nemotron_h", "nemotron_h latent", "nemotron_h dense", "gemma4_text", "gemma4_text small",
        "falcon_h1", "cohere", "olmo",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint, and the file of it."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        path = write(folder / "plain", **MODELS[name])
        return path, gguf_files.write(path, folder / "x.gguf")

    return make


def held(path, tp=1, pp=1, **options):
    models = threads.run(lambda comm: load(path, mesh.build(comm, tp, pp), **options), tp * pp)
    return [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]


@pytest.mark.sample(2)
@pytest.mark.parametrize("tp, pp, way", [(1, 1, "direct"), (1, 1, "striped"), (3, 1, "direct"), (2, 2, "striped")])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2", "qwen3_5_text"])
def test_plain_files_make_the_same_bits(made, monkeypatch, name, tp, pp, way):
    monkeypatch.setattr(striped, "CHUNK", 3001)
    path, file = made(name)
    for one, other in zip(held(file, tp, pp, way=way), held(path, tp, pp), strict=True):
        assert one.keys() == other.keys()
        for key, x in one.items():
            # 1 was added and taken off again, and an exponential is in the file.
            far = 1e-6 if name in ("gemma2", "qwen3_5_text") and ("norm" in key or "A_log" in key) else 0
            assert x.dtype == other[key].dtype and (x - other[key]).abs().max() <= far, key


@pytest.mark.parametrize("tp, pp, way", [(1, 1, "direct"), (2, 2, "striped")])
def test_shards_make_the_same_bits(made, tmp_path, tp, pp, way):
    path, whole = made("llama")
    file = gguf_files.write(path, tmp_path / "x.gguf", shards=3)
    assert len(list(tmp_path.glob("x-0000?-of-00003.gguf"))) == 3 and file.name == "x-00001-of-00003.gguf"
    for one, other in zip(held(file, tp, pp, way=way), held(whole, tp, pp), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(x, other[key]) for key, x in one.items())


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", of_short(MODELS, first_of_each_class(MODELS)))
def test_each_architecture_computes_as_its_checkpoint(made, expected, caplog, name):
    (path, file), ids = made(name), tokens(40)
    caplog.set_level("WARNING", "phalanx")
    (logits,) = run_steps(file, [ids], tp=2, max_model_len=128)
    assert distance(logits, expected(path, ids)) < 1e-4
    assert not [one for one in caplog.records if one.name.startswith("phalanx")]


def test_each_reader_has_a_file():
    types = {options["model_type"] for options in MODELS.values()}
    names = {architectures.spelled(gguf_files.ARCHITECTURES.get(one, one)) for one in types}
    # In test_mmproj.py, of nemotron_h with experts, and of llama
    elsewhere = {"qwen2vl", "qwen3vl", "qwen3vlmoe", "nemotron_h_moe", "internlm2"}
    assert names | elsewhere == set(architectures.supported())


def test_layers_that_predict_further_tokens_are_told(made, tmp_path, caplog):
    path, _ = made("glm4_moe plain")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    names = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm")
    further = {f"blk.4.nextn.{name}.weight": np.zeros(3, np.float32) for name in names}
    further |= {"blk.4.attn_q.weight": np.zeros((3, 3), np.float32)}
    file = gguf_files.write(tmp_path, tmp_path / "x.gguf", **further)
    caplog.set_level("INFO", "phalanx")
    run_steps(file, [[1]])
    assert "multi-token prediction" in caplog.text
    assert not [one for one in caplog.records if one.levelname != "INFO"]


@pytest.mark.parametrize(
    "name, architecture",
    [("qwen3_next", ""), ("qwen3_5_moe_text", ""), ("mistral4", ""), ("mistral4", "deepseek2"), ("llama", "internlm2")],
)
def test_other_forms_of_files(made, tmp_path, expected, name, architecture):
    """Qwen3-Next's first files have a net's projections together; newer files may have experts' gate and up so. Mistral
    Small 4 may be an architecture that others have, too."""
    path, ids = made(name)[0], tokens(40)
    changed = tmp_path / "x.gguf"
    gguf_files.write(path, changed, architecture=architecture, together=True)
    (logits,) = run_steps(changed, [ids], tp=2)
    assert distance(logits, expected(path, ids)) < 1e-4


SIZES = dict(hidden_size=96, intermediate_size=320, head_dim=16, vocab_size=509)
MIXED = {"attn_q.weight": "Q8_0", "attn_k.weight": "BF16", "ffn_up.weight": "F16", "token_embd.weight": "Q8_0"}
SUPER = dict(hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4, num_key_value_heads=2)
EACH = itertools.cycle([*sorted(CODECS.keys() - {"Q8_0"}), "MXFP4"])
KINDS = {
    "q8_0": "Q8_0",
    "mixed": lambda name: next((MIXED[end] for end in MIXED if name.endswith(end)), "Q8_0"),
    "super": functools.cache(lambda name: next(EACH)),  # the same for a name that comes again
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Type of model, kind of tensors → the GGUF file, and the checkpoint that transformers is to compute with."""

    @functools.cache
    def make(model_type, kind):
        folder = tmp_path_factory.mktemp("quantised")
        sizes = SIZES | SUPER if kind == "super" else SIZES
        path = write(folder / "plain", model_type=model_type, **sizes, tie_word_embeddings=kind == "mixed")
        same = gguf_files.dequantised(path, folder / "same", KINDS[kind])
        return gguf_files.write(path, folder / "x.gguf", KINDS[kind]), same

    return make


@pytest.mark.parametrize("name, kind, tp, pp", [
    ("llama", "q8_0", 1, 1), ("llama", "q8_0", 3, 1), ("qwen3", "q8_0", 1, 2), ("llama", "mixed", 2, 1),
    ("qwen3", "mixed", 3, 1), ("llama", "super", 2, 1),
])  # fmt: skip
def test_quantised_files_compute_with_what_they_hold(quantised, expected, name, kind, tp, pp):
    (file, same), ids = quantised(name, kind), tokens(60, vocab=509)
    (logits,) = run_steps(file, [ids], tp=tp, pp=pp)
    assert distance(logits, expected(same, ids)) < (3e-4 if kind == "super" else 1e-4)  # of larger sums


@pytest.mark.long
def test_greedy_tokens_of_super_blocks(tmp_path):
    path = write(tmp_path / "plain", model_type="llama", **SIZES | SUPER)
    same = gguf_files.dequantised(path, tmp_path / "same", "Q6_K")
    check_greedy(gguf_files.write(path, tmp_path / "x.gguf", "Q6_K"), Reference(same))


LATENT = dict(
    model_type="deepseek_v3", num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=64, qk_nope_head_dim=32,
    qk_rope_head_dim=32, v_head_dim=32, q_lora_rank=64, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    n_group=1, topk_group=1, moe_intermediate_size=64, first_k_dense_replace=1,
)  # fmt: skip
SOFTMAX = LATENT | dict(
    model_type="mistral4", rope_parameters=DEEPSEEK_YARN | dict(mscale=0.7, llama_4_scaling_beta=0.1),
)  # fmt: skip
SINKS = dict(
    model_type="gpt_oss", num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_local_experts=4,
    num_experts_per_tok=2, sliding_window=11, rope_parameters=dict(rope_type="default", rope_theta=1e4),
)  # fmt: skip


GATE_AND_UP = dict(
    model_type="qwen3_5_moe_text", layer_types=["full_attention"] * 2, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=64, shared_expert_intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32,
)  # fmt: skip


GEMMA4 = dict(intermediate_size=128, head_dim=32, global_head_dim=64, num_attention_heads=4, num_key_value_heads=2)
GEMMA4_EXPERTS = MODELS["gemma4_text"] | GEMMA4 | dict(moe_intermediate_size=64, num_hidden_layers=3)
DELTA = MODELS["kimi_linear"] | dict(
    layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"], num_attention_heads=4,
    num_key_value_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, num_experts=4,
    num_experts_per_token=2, moe_intermediate_size=64, linear_head_dim=32, linear_num_heads=4,
)  # fmt: skip
GEMMA4_SMALL = MODELS["gemma4_text small"] | GEMMA4 | dict(hidden_size_per_layer_input=32)


@pytest.mark.parametrize(
    "sizes, kind",
    [
        (LATENT, "Q8_0"),
        (SOFTMAX, "Q8_0"),
        (SINKS, "MXFP4"),
        (GATE_AND_UP, "Q8_0"),
        (GEMMA4_EXPERTS, "Q8_0"),
        (GEMMA4_SMALL, "Q8_0"),
        (DELTA, "Q8_0"),
    ],
    ids=["latents", "latents and softmax", "mxfp4", "gate and up", "Gemma 4's experts", "Gemma 4 small", "Kimi Linear"],
)
def test_what_files_hold_apart_is_quantised(tmp_path, expected, caplog, sizes, kind):
    def kind_of(name):
        return kind if kind == "Q8_0" or name.endswith("_exps.weight") else "Q8_0" if "attn_q." in name else "F32"

    path = write(tmp_path / "plain", **dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2) | sizes)
    same = gguf_files.dequantised(path, tmp_path / "same", kind_of)
    file = gguf_files.write(path, tmp_path / "x.gguf", kind_of, together=sizes in (GATE_AND_UP, SOFTMAX))
    ids = tokens(40)
    caplog.set_level("INFO", "phalanx")
    for tp, way in ((1, "direct"), (2, "striped")):
        (logits,) = run_steps(file, [ids], tp=tp, way=way)
        assert distance(logits, expected(same, ids)) < 1e-4
    if kind == "MXFP4" or sizes["model_type"] == "gemma4_text":
        assert not [one for one in caplog.messages if one.startswith("dequantised")]


NETS = dict(
    model_type="qwen3_5_text", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    layer_types=["linear_attention", "full_attention"], rms_norm_eps=0.1,
)  # fmt: skip


@pytest.mark.parametrize("dim, ways", [(32, [(1, "direct"), (2, "striped")]), (16, [(2, "direct"), (1, "striped")])])
def test_value_heads_in_another_order(tmp_path, expected, caplog, dim, ways):
    """out_proj has them as inputs: it stays quantised where a head is whole groups."""
    path = write(tmp_path / "plain", **NETS, linear_value_head_dim=dim)
    same = gguf_files.dequantised(path, tmp_path / "same", "Q8_0")
    file, ids = gguf_files.write(path, tmp_path / "x.gguf", "Q8_0"), tokens(40)
    caplog.set_level("INFO", "phalanx")
    for tp, way in ways:
        (logits,) = run_steps(file, [ids], tp=tp, way=way)
        assert distance(logits, expected(same, ids)) < 1e-4
    told = [one for one in caplog.messages if one.startswith("dequantised")]
    assert len(told) == (2 if dim == 16 else 0)


MAMBA2 = {
    "granitemoehybrid": dict(mamba_n_heads=8, mamba_d_head=16, num_attention_heads=4, num_key_value_heads=2),
    "nemotron_h": {},
    "falcon_h1": dict(  # powers of two change no codes
        num_attention_heads=4,
        num_key_value_heads=2,
        ssm_multipliers=[0.5, 2.0, 1.0, 4.0, 0.25],
        ssm_in_multiplier=2.0,
    ),
}


@pytest.mark.parametrize("name", MAMBA2)
def test_linears_of_mamba2_are_quantised(tmp_path, expected, name):
    path = write(tmp_path / "plain", **MODELS[name] | dict(hidden_size=64) | MAMBA2[name])
    file, ids = gguf_files.write(path, tmp_path / "x.gguf", lambda of: "Q8_0" if "ssm_in" in of else "F32"), tokens(40)
    tensors = load_file(path / "model.safetensors")
    for one in [one for one in tensors if one.endswith(("mamba.in_proj.weight", "mixer.in_proj.weight"))]:
        codes = gguf.quants.quantize(tensors[one].float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        held = gguf.quants.dequantize(codes, gguf.GGMLQuantizationType.Q8_0)
        tensors[one] = torch.from_numpy(held.copy()).to(tensors[one].dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert distance(run_steps(file, [ids])[0], expected(path, ids)) < 1e-3


def test_random_weights_are_moderate(quantised, tmp_path):
    """Weights of each type, of experts in MXFP4, and of others."""
    path = write(tmp_path / "plain", **SINKS, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    experts = [
        gguf_files.write(path, tmp_path / f"{kind}.gguf", lambda name, kind=kind: kind if "_exps.w" in name else "Q8_0")
        for kind in ("MXFP4", "Q4_0")
    ]
    for file in (quantised("llama", "super")[0], *experts):
        for tp in (1, 2):
            (logits,) = run_steps(file, [tokens(20)], load_format="dummy", tp=tp)
            assert 0.5 < logits.std() < 2


def test_types_without_kernels_are_dequantised(quantised, caplog):
    caplog.set_level("INFO", "phalanx")
    run_steps(quantised("llama", "super")[0], [[1]])
    (told,) = [one for one in caplog.messages if one.startswith("dequantised while they are loaded, ")]
    assert told.endswith(": MXFP4")


@pytest.mark.parametrize("tp, dense", [(1, []), (2, ["o_proj"])])
def test_groups_that_a_cut_would_part_are_dequantised(tmp_path, caplog, tp, dense):
    """Each rank would get half of a super-block of 256 inputs. The log says so."""
    caplog.set_level("INFO", "phalanx")
    path = write(tmp_path / "plain", model_type="llama", **SIZES | SUPER)
    file = gguf_files.write(path, tmp_path / "x.gguf", "Q4_K")
    for model in threads.run(lambda comm: load(file, mesh.build(comm, tp, 1)), tp):
        layer = model.model.layers["1"]
        linears = {"o_proj": layer.self_attn.o_proj, "down_proj": layer.mlp.down_proj, "head": model.lm_head}
        assert [name for name, one in linears.items() if one.matrix is not None] == dense
    told = [one for one in caplog.messages if "groups cut by --tp" in one]
    assert len(told) == bool(dense) and all(one.endswith(": Q4_K") for one in told)


def test_quantised_linears_stay_so(quantised):
    file, _ = quantised("llama", "mixed")
    (model,) = threads.run(lambda comm: load(file, mesh.build(comm, 1, 1)), 1)
    parts = model.model.layers["0"].self_attn.qkv_proj.parts
    assert [isinstance(part, HalfFloats) for part in parts] == [False, ops.available(), False]
    assert [part.matrix is None for part in parts] == [True, ops.available(), True]
    table = model.model.embed_tokens.part
    assert model.lm_head.matrix is None and (table is not None) == ops.available()


@pytest.mark.skipif(not ops.available(), reason="plain where torch computes")
@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_tables_and_tied_heads_stay_in_their_type(tmp_path, monkeypatch, name, tp):
    """Nothing is dequantised while a file is loaded, and a table is in memory once."""
    file = gguf_files.write(write(tmp_path / "plain", **MODELS[name] | SIZES), tmp_path / "x.gguf", "Q8_0")
    with monkeypatch.context() as patch:
        patch.setattr(ops, "available", lambda: False)
        (want,) = run_steps(file, [tokens(40, vocab=509)], max_model_len=128)
    read = lambda *_: pytest.fail("gguf-py dequantises")  # noqa: E731
    monkeypatch.setattr("gguf.quants.dequantize", read)
    models = threads.run(lambda comm: load(file, mesh.build(comm, tp, 1)), tp)
    for model in models:
        table, head = model.model.embed_tokens.part, model.lm_head.parts[0]
        assert (table is head) == model.tied == (name == "gemma2")
        assert table.packed.blocks.dtype == torch.uint8 and not list(table.parameters())
        plain = [one for one in model.parameters() if one.dim() == 2]
        assert not plain  # no matrix is there in floating point
    assert distance(run_steps(file, [tokens(40, vocab=509)], tp=tp, max_model_len=128)[0], want) < 1e-3


@pytest.mark.skipif(not ops.available(), reason="copies where torch computes")
def test_blocks_are_packed_from_the_mapped_file(tmp_path, monkeypatch):
    """A tensor that fills a parameter is not copied first."""
    file = gguf_files.write(write(tmp_path / "plain", **MODELS["llama"] | SIZES), tmp_path / "x.gguf", "Q8_0")
    copied = []
    monkeypatch.setattr(safetensors, "put", lambda values, *_: copied.append(values.dtype))
    threads.run(lambda comm: load(file, mesh.build(comm, 1, 1)), 1)
    # Each of four layers copies q, k and v, and gate and up, which are multiplied as one.
    assert copied.count(torch.uint8) == 4 * 5
