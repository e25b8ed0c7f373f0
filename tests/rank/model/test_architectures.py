"""Every architecture: f32 logits equal transformers' within 1e-4, however the model is cut; greedy tokens are equal."""

import functools
import json

import pytest
import torch
import transformers
from phalanx.errors import MODEL, FatalError
from phalanx.rank.model import architectures
from phalanx.rank.model.config import read_config
from phalanx.rank.model.measure import GroupRank, build
from safetensors.torch import load_file, save_file

from .harness import MIXED_LENGTHS, MIXED_STEPS, auto_model, distance, run_steps, tokens
from .hybrids import HYBRIDS

TOLERANCE = 1e-4
COMMON = dict(
    hidden_size=48, intermediate_size=100, num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=6,
    vocab_size=512, max_position_embeddings=512, bos_token_id=0, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
TEMPERATURE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.7], "long_factor": [2.0, 8.0]}
DEEPSEEK = dict(
    num_key_value_heads=12, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, kv_lora_rank=24,
    n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=3, moe_intermediate_size=20,
)  # fmt: skip
DEEPSEEK_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
# What each is tested with besides; several sets where an architecture has several shapes.
MODELS = {
    "qwen2": dict(model_type="qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=2),
    "mistral": dict(model_type="mistral", head_dim=16, sliding_window=13),
    "mistral no window": dict(model_type="mistral", sliding_window=None),
    "ministral": dict(
        model_type="ministral", head_dim=16, sliding_window=13, layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "ministral3": dict(model_type="ministral3", head_dim=16, rope_parameters=TEMPERATURE),
    "mistral3": dict(
        model_type="mistral3", vision_config=dict(model_type="pixtral"), image_token_index=500,
        tie_word_embeddings=False, text_config=dict(model_type="mistral", head_dim=16, sliding_window=13),
    ),
    "mistral3 of ministral3": dict(
        model_type="mistral3", vision_config=dict(model_type="pixtral"), image_token_index=500,
        text_config=dict(
            model_type="ministral3", head_dim=16, rope_parameters=TEMPERATURE, tie_word_embeddings=True,
        ),
    ),
    "gemma": dict(model_type="gemma", head_dim=16),
    "gemma2": dict(
        model_type="gemma2", head_dim=16, query_pre_attn_scalar=24, sliding_window=11, attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": dict(
        model_type="gemma3_text", num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=24, sliding_window=11,
        rope_parameters=TWO_ROPES,
    ),
    "gemma3": dict(
        model_type="gemma3", vision_config=dict(model_type="siglip_vision_model"), image_token_index=500,
        text_config=dict(
            model_type="gemma3_text", head_dim=16, sliding_window=11, rope_parameters=TWO_ROPES,
            layer_types=["full_attention", "sliding_attention"] * 2,
        ),
    ),
    "gemma3_text capped": dict(
        model_type="gemma3_text", head_dim=16, layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=11, final_logit_softcapping=3.0, attention_bias=True,
    ),
    "apertus": dict(model_type="apertus", attention_bias=True),
    "cohere2": dict(model_type="cohere2", sliding_window=11, logit_scale=0.7),
    "cohere2 biased": dict(
        model_type="cohere2", sliding_window=11, logit_scale=0.7, attention_bias=True,
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters=dict(rope_type="default", rope_theta=1e3),
    ),
    "glm": dict(model_type="glm", head_dim=16),
    "glm rotated whole": dict(model_type="glm", head_dim=16, attention_bias=False, partial_rotary_factor=1.0),
    "glm4": dict(model_type="glm4", head_dim=16, num_key_value_heads=1),
    "olmo2": dict(model_type="olmo2"),
    "olmo2 few keys": dict(model_type="olmo2", num_key_value_heads=1, attention_bias=True, rms_norm_eps=0.1),
    "olmo3": dict(
        model_type="olmo3", sliding_window=11,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granite": dict(
        model_type="granite", embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.7,
        logits_scaling=0.5, tie_word_embeddings=True,
    ),
    "granite biased": dict(model_type="granite", attention_bias=True, mlp_bias=True, residual_multiplier=0.7),
    "phi3": dict(model_type="phi3", sliding_window=13),
    "phi3 short": dict(
        model_type="phi3", rope_parameters=LONGROPE, original_max_position_embeddings=512,
        max_position_embeddings=4096,
    ),
    "phi3 partial": dict(model_type="phi3", num_attention_heads=6, partial_rotary_factor=0.75),
    "qwen2_moe": dict(
        model_type="qwen2_moe", num_experts=12, num_experts_per_tok=3, moe_intermediate_size=20,
        shared_expert_intermediate_size=36, mlp_only_layers=[1], use_sliding_window=True, sliding_window=9,
        max_window_layers=2,
    ),
    "qwen2_moe without biases": dict(
        model_type="qwen2_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20,
        shared_expert_intermediate_size=36, qkv_bias=False,
    ),
    "qwen3_moe": dict(
        model_type="qwen3_moe", head_dim=8, num_experts=10, num_experts_per_tok=4, moe_intermediate_size=28,
        norm_topk_prob=True, decoder_sparse_step=2,
    ),
    "qwen3_moe unnormalised": dict(
        model_type="qwen3_moe", head_dim=8, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=28,
    ),
    "glm4_moe": dict(
        model_type="glm4_moe", n_routed_experts=16, n_shared_experts=2, num_experts_per_tok=3,
        moe_intermediate_size=20, n_group=4, topk_group=2, routed_scaling_factor=1.8, first_k_dense_replace=2,
        head_dim=8, partial_rotary_factor=0.5, use_qk_norm=True, attention_bias=True,
    ),
    "glm4_moe plain": dict(
        model_type="glm4_moe", n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=20,
        norm_topk_prob=False, first_k_dense_replace=0, head_dim=8,
    ),
    "deepseek_v2": DEEPSEEK | dict(
        model_type="deepseek_v2", q_lora_rank=None, first_k_dense_replace=1, n_shared_experts=2,
        rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek_v2 in groups": DEEPSEEK | dict(
        model_type="deepseek_v2", q_lora_rank=40, topk_method="group_limited_greedy", n_group=4,
        topk_group=2, routed_scaling_factor=2.5, attention_bias=True, tie_word_embeddings=True,
    ),
    "deepseek_v3": DEEPSEEK | dict(
        model_type="deepseek_v3", q_lora_rank=40, first_k_dense_replace=2, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek_v3 plain": DEEPSEEK | dict(
        model_type="deepseek_v3", q_lora_rank=None, first_k_dense_replace=0, n_shared_experts=2, n_group=1,
        topk_group=1, norm_topk_prob=False, rope_interleave=False,
    ),
    "minimax_m2": dict(  # transformers before 5.18 does not read rotary_dim
        model_type="minimax_m2", num_local_experts=10, num_experts_per_tok=3, head_dim=8, rotary_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "minimax_m2 few keys": dict(
        model_type="minimax_m2", num_local_experts=5, num_experts_per_tok=5, head_dim=8, num_key_value_heads=1,
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=6, num_experts_per_tok=2, sliding_window=11),
    "gpt_oss": dict(
        model_type="gpt_oss", num_local_experts=6, num_experts_per_tok=2, head_dim=8, sliding_window=11,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    ),
    "gpt_oss few keys": dict(
        model_type="gpt_oss", num_local_experts=5, num_experts_per_tok=1, head_dim=16, num_key_value_heads=1,
        sliding_window=7, layer_types=["full_attention", "sliding_attention"] * 2, attention_bias=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e3), intermediate_size=96,
    ),
    "phi": dict(model_type="phi", num_attention_heads=6, num_key_value_heads=1),
    "phi wide rotation": dict(
        model_type="phi", num_attention_heads=6, partial_rotary_factor=0.75, num_key_value_heads=None,
        hidden_act="gelu",
    ),
    "smollm3": dict(model_type="smollm3", tie_word_embeddings=True),
    "smollm3 sliding": dict(
        model_type="smollm3", use_sliding_window=True, sliding_window=11, no_rope_layers=[0, 1, 1, 0],
        attention_bias=True, mlp_bias=True, rope_parameters=dict(rope_type="default", rope_theta=1e3),
    ),
    "stablelm": dict(model_type="stablelm", num_attention_heads=6, num_key_value_heads=6, use_qkv_bias=True),
    "stablelm parallel": dict(
        model_type="stablelm", num_attention_heads=6, num_key_value_heads=1, use_parallel_residual=True,
        qk_layernorm=True, partial_rotary_factor=0.5, tie_word_embeddings=True,
    ),
    "starcoder2": dict(model_type="starcoder2", sliding_window=7),
    "starcoder2 without biases": dict(
        model_type="starcoder2", use_bias=False, tie_word_embeddings=False, num_attention_heads=6,
        num_key_value_heads=1,
    ),
    "gpt_bigcode": dict(model_type="gpt_bigcode", num_key_value_heads=None, n_inner=100, activation_function="gelu"),
    "gpt_bigcode unscaled": dict(
        model_type="gpt_bigcode", num_attention_heads=6, num_key_value_heads=1, scale_attn_weights=False,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
MODELS |= HYBRIDS


def first_of_each_class(models):
    """Names: an architecture whose file hands on another's Model differs from it by its Args."""
    found = {architectures.find(options["model_type"]).Model: name for name, options in reversed(models.items())}
    return set(found.values())


def of_short(names, short):
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


def options_of(**options):
    """An entry of MODELS with what all have."""
    if "text_config" in options:
        whole = {"text_config": COMMON | options["text_config"], "vision_config": VISION | options["vision_config"]}
        return options | whole
    return COMMON | options


def write(directory, **options):
    """A checkpoint of random weights, as transformers writes it."""
    config = transformers.AutoConfig.for_model(**options_of(**options))
    torch.manual_seed(0)
    model = auto_model(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 * (2 if "lm_head" in name or "embed" in name else 1))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter += 0.2 * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.3)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint, made once."""
    return functools.cache(lambda name: write(tmp_path_factory.mktemp("model"), **MODELS[name]))


FIRST = first_of_each_class(MODELS)


@pytest.mark.parametrize("name, tp, pp", [
    *((name, 3, 1) for name in MODELS), *((name, 1, 2) for name in sorted(FIRST)),
    *(pytest.param(name, *cut, marks=pytest.mark.long) for name in MODELS for cut in ((1, 1), (2, 2))),
])  # fmt: skip
def test_logits(made, expected, name, tp, pp):
    """In two chunks and, as where texts are generated, token by token."""
    path, ids = made(name), tokens(60)
    (logits,) = run_steps(path, [ids], [[(0, 33)], [(0, 23)], *[[(0, 1)]] * 4], tp=tp, pp=pp, max_model_len=512)
    assert distance(logits, expected(path, ids)) < TOLERANCE


def test_kimi_k2(made, tmp_path, expected):
    """Which transformers does not know: DeepSeek-V3 by another name."""
    path = made("deepseek_v3")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    (logits,) = run_steps(tmp_path, [tokens(20)], tp=2)
    assert distance(logits, expected(path, tokens(20))) < TOLERANCE


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("tp, pp", [(1, 1), (3, 1), (2, 2)])
def test_latents_of_chunks_and_mixed_batches(made, expected, name, tp, pp):
    """Latents that are expanded for long chunks and not for short ones, beside sequences that decode."""
    sequences = [tokens(n, seed=n) for n in MIXED_LENGTHS]
    found = run_steps(made(name), sequences, MIXED_STEPS, tp=tp, pp=pp)
    for ids, logits in zip(sequences, found, strict=True):
        assert distance(logits, expected(made(name), ids)) < TOLERANCE


def test_longrope_beyond_the_original_context(tmp_path, expected):
    """The longest sequence that is served decides on the list of factors."""
    path = write(
        tmp_path, model_type="phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32,
        max_position_embeddings=256,
    )  # fmt: skip
    ids = tokens(100)
    (logits,) = run_steps(path, [ids])
    assert distance(logits, expected(path, ids)) < TOLERANCE


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_longrope_by_its_old_name(made, tmp_path, expected, key):
    """Of Phi-3's first checkpoints: rope_scaling of type su, and rope_theta beside it."""
    path, ids = made("phi3 short"), tokens(60)
    config = json.loads((path / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    old = {key: "su"} | {name: LONGROPE[name] for name in ("short_factor", "long_factor")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": old, "rope_theta": theta}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    (logits,) = run_steps(tmp_path, [ids], max_model_len=512)
    assert distance(logits, expected(path, ids)) < TOLERANCE


def test_the_vision_part_is_left_out(made, caplog):
    caplog.set_level("INFO")
    run_steps(made("gemma3"), [[1]])
    (message,) = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert message.startswith("text alone is served: ") and not [
        one for one in caplog.records if one.levelname != "INFO"
    ]


@pytest.mark.parametrize("name, tp, pp", [("qwen2_moe", 1, 2), ("glm4_moe", 1, 2), ("stablelm parallel", 2, 1)])
def test_what_other_ranks_read_is_used(made, caplog, name, tp, pp):
    """One rank logs for all: it reads neither layers of other stages nor norms of other ranks' heads."""
    caplog.set_level("WARNING", "phalanx")
    run_steps(made(name), [[1]], tp=tp, pp=pp)
    assert not caplog.messages


@pytest.mark.parametrize("pp", [1, 2])
def test_a_layer_that_predicts_a_second_token_is_left_out(made, tmp_path, caplog, pp):
    path = made("glm4_moe plain")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    further = {"model.layers.4.eh_proj.weight": torch.zeros(3), "model.layers.4.mlp.gate.weight": torch.zeros(3)}
    save_file(further, tmp_path / "more.safetensors")
    files = {name: "model.safetensors" for name in load_file(path / "model.safetensors")}
    weight_map = files | dict.fromkeys(further, "more.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    caplog.set_level("INFO", "phalanx")
    run_steps(tmp_path, [[1]], pp=pp)
    assert "layers that predict further tokens are left out: 2 tensors" in caplog.messages
    assert not [one for one in caplog.records if one.levelname != "INFO"]


def test_a_head_of_its_own_is_read_whatever_the_whole_says(tmp_path, expected):
    path = write(tmp_path, **MODELS["mistral3"])
    want = expected(path, tokens(20))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    (logits,) = run_steps(path, [tokens(20)], tp=2)
    assert distance(logits, want) < TOLERANCE


def test_a_head_that_is_not_there_is_tied_whatever_the_whole_says(made, tmp_path, expected):
    path = made("mistral3 of ministral3")
    config = json.loads((path / "config.json").read_text())
    assert config["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    (logits,) = run_steps(tmp_path, [tokens(20)], tp=2)
    assert distance(logits, expected(path, tokens(20))) < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma2", {"layer_types": ["linear_attention"] * 4}, "layer type 'linear_attention' is not supported"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, and none for layer 1"),
        ("mistral", {"rope_parameters": TWO_ROPES}, "differ between full_attention and sliding_attention layers"),
        ("ministral3", {}, "rope_parameters has no llama_4_scaling_beta, which this model type needs"),
        ("mistral3", {"text_config": {"model_type": "llama"}}, "text model of a mistral3 model is 'llama'"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block False is not supported"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ("deepseek_v2", DEEPSEEK | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (
            "deepseek_v2", DEEPSEEK | {"attention_bias": True, "q_lora_rank": None},
            "attention_bias without q_lora_rank is not supported",
        ),
        ("deepseek_v3", DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek_v3", {}, "config.json has no kv_lora_rank"),
        (
            "deepseek_v2", DEEPSEEK | {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 0.7}},
            "rope type 'yarn' needs 'factor'",
        ),
        (
            "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 10.0},
            "swiglu_limit 10.0 is not supported for this model type; supported: 7.0",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, model_type, changes, message):
    config = COMMON | {"model_type": model_type, "head_dim": 16} | changes
    if "text_config" in changes:
        config["text_config"] = COMMON | changes["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FatalError, match=message) as stop:
        build(read_config(tmp_path), GroupRank(0, 1), GroupRank(0, 1))
    assert stop.value.code == MODEL


def test_each_architecture_is_here():
    elsewhere = {"llama", "qwen3", "chatglm", "kimi_k2"}  # test_fidelity.py, test_chatglm.py, test_kimi_k2
    assert {options["model_type"] for options in MODELS.values()} | elsewhere == set(architectures.supported())
