"""Models that an architecture does not take: what a user is told, in the names that the model's files have."""

import functools
import json
import re
from copy import deepcopy

import pytest
import transformers
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.rank.model import architectures
from phalanx.rank.model.architectures import minimax_m2
from phalanx.rank.model.config import read_config
from phalanx.rank.model.load import load
from phalanx.rank.model.measure import GroupRank, build
from safetensors.torch import load_file, save_file

from . import test_bailing_moe, test_chatglm
from .test_architectures import COMMON, MODELS, options_of, write
from .vision import test_blip, test_moondream1

REFUSED = [
    ("falcon_h1", {"ssm_out_multiplier": 0}, "ssm_out_multiplier is 0, expected float, above 0"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers is [1.0], expected 2 numbers"),
    ("falcon_h1", {"ssm_multipliers": []}, "ssm_multipliers is [], expected 5 numbers"),
    ("falcon_h1", {"time_step_limit": [0.001, 0.1]}, "time_step_limit [0.001, 0.1] is not supported"),
    ("granitemoehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit [0.0, 0.1] is not supported"),
    ("nemotron_h", {"time_step_limit": "auto"}, "time_step_limit 'auto' is not supported"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min 0.5 is not supported"),
    ("hy_v3", {"route_norm": False}, "route_norm False is not supported"),
    ("hy_v3", {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid False is not supported"),
    ("phi", {"qk_layernorm": True}, "config.json: qk_layernorm True is not supported for this model type"),
    ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    ("phi", {"layer_norm_eps": "small"}, "layer_norm_eps is 'small', expected float"),
    ("stablelm", {"use_parallel_residual": 2}, "use_parallel_residual is 2, expected bool"),
    ("starcoder2", {"hidden_act": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
    ("gpt_bigcode", {"multi_query": False}, "multi_query False is not supported"),
    ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
    ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported"),
    ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size is 0, expected int, at least 1"),
    ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "layer type 'sliding_attention' is not supported"),
    ("falcon", {"alibi": True}, "alibi True is not supported"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False is not supported"),
    ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim 24 is not supported"),
    ("gpt_bigcode", {"n_head": "many"}, "config.json: n_head is 'many', not a positive integer"),
    ("gpt_bigcode", {"n_embd": None}, "config.json has no n_embd"),
    ("gpt_bigcode", {"activation_function": 3}, "activation_function is 3, expected str"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected int, at least 1"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0, expected int, at least 1"),
    ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0, expected int, at least 1"),
    ("glm4_moe", {"n_group": 0}, "n_group is 0, expected int, at least 1"),
    ("glm4_moe", {"topk_group": 0}, "topk_group is 0, expected int, at least 1"),
    ("glm4_moe", {"n_group": 5}, "16 experts do not fall into 5 groups"),
    ("glm4_moe", {"n_group": 16}, "16 experts in 16 groups are 1 in each, but groups are chosen by their best 2"),
    ("glm4_moe", {"n_group": 8, "topk_group": 1}, "cannot visit 3 experts of its best 1 of 8 groups of 2"),
    ("glm4_moe", {"n_group": 2, "topk_group": 3}, "cannot visit 3 experts of its best 3 of 2 groups of 8"),
    ("qwen2", {"intermediate_size": -1}, "intermediate_size is -1, expected int, at least 0"),
    ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096', expected int, at least 1"),
    ("qwen2", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window is 0, expected int, at least 1"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected int, at least 1"),
    ("mistral", {"sliding_window": True}, "sliding_window is True, expected int, at least 1"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, expected float, above 0"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0.0, expected float, above 0"),
    ("granite", {"logits_scaling": "8"}, "logits_scaling is '8', expected float, above 0"),
    ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50', expected float"),
    ("qwen2", {"layer_types": ["full_attention", 3]}, "layer_types is ['full_attention', 3], expected list[str]"),
    ("qwen2_moe", {"mlp_only_layers": [0, "1"]}, "mlp_only_layers is [0, '1'], expected list[int]"),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for this model type"),
    ("glm4_moe", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported for this model type"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias True is not supported for this model type"),
    ("deepseek_v4", {"norm_topk_prob": False}, "norm_topk_prob False is not supported for this model type"),
    ("deepseek_v4", {"compress_rates": {"a": 4}}, "compress_rates has None for heavily_compressed_attention"),
    ("deepseek_v4", {"partial_rotary_factor": -1.0}, "-1.0 of each head is rotated"),
    ("deepseek_v4", {"compress_rope_theta": float("inf")}, "compress_rope_theta is inf, expected float, above 0"),
    ("lfm2", {"block_ffn_dim_multiplier": float("inf")}, "block_ffn_dim_multiplier is inf, expected float, above 0"),
    ("lfm2", {"block_multiple_of": 0}, "block_multiple_of is 0, expected int, at least 1"),
    ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval is 0, expected int, at least 1"),
    ("hunyuan_v1_moe", {"moe_topk": [1]}, "moe_topk has 1 entries, and none for layer 1"),
    ("minimax_m3_vl_text", {"index_n_heads": 3}, "index_n_heads 3 is not supported for this model type; supported: 6"),
    ("minimax_m3_vl_text", {"index_local_blocks": 5}, "index_local_blocks 5 is not supported"),
    ("minimax_m3_vl_text", {"index_head_dim": 4}, "index_head_dim 4 is less than the 8 elements"),
    ("minimax_m3_vl_text", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0 is not supported"),
    (
        "minimax_m3_vl_text",
        {"sparse_attention_config": {"sparse_init_block": 1}},
        "sparse_init_block 1 is not supported",
    ),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for this model type"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm False is not supported for this model type; supported: True"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supported"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias False is not supported"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size 64 is not supported"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list with 0 is not supported for this model type"),
    ("olmo2", {"clip_qkv": 8.0}, "config.json: clip_qkv 8.0 is not supported for this model type; supported: None"),
    ("olmo3", {"clip_qkv": 8.0}, "config.json: clip_qkv 8.0 is not supported for this model type; supported: None"),
    ("stablelm", {"rope_pct": 0.5}, "rope_pct is 0.5, but partial_rotary_factor, which counts, is 0.25"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention' is not supported"),
]
# Types without a rope, or with none by default.
UNROTATED = (
    "blip",
    "glm5_next",
    "glm5_next_text",
    "gpt2",
    "gpt_bigcode",
    "granitemoehybrid",
    "kimi_linear",
    "nemotron_h",
    "opt",
)
MISSING = [
    ("phi", "model.layers.1.self_attn.dense.bias"),
    ("phi", "model.layers.0.mlp.fc2.weight"),
    ("phi", "model.final_layernorm.bias"),
    ("phi", "lm_head.bias"),
    ("stablelm parallel", "model.layers.2.self_attn.q_layernorm.norms.3.weight"),
    ("starcoder2", "model.layers.2.mlp.c_fc.bias"),
    ("lfm2", "model.layers.0.conv.conv.weight"),
    ("lfm2", "model.layers.1.self_attn.out_proj.weight"),
    ("lfm2", "model.layers.2.feed_forward.w1.weight"),
    ("gpt_bigcode", "transformer.h.0.attn.c_attn.weight"),
    ("gpt_bigcode", "transformer.h.3.ln_2.bias"),
    ("gpt_bigcode", "transformer.wpe.weight"),
    ("gpt2", "transformer.h.1.mlp.c_fc.weight"),
    ("gptj", "transformer.h.2.mlp.fc_in.bias"),
    ("llama4_text", "model.layers.1.feed_forward.router.weight"),
    ("llama4_text", "model.layers.0.feed_forward.down_proj.weight"),
    ("opt", "model.decoder.layers.1.fc2.bias"),
    ("opt", "model.decoder.layers.0.final_layer_norm.weight"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint, made once."""
    return functools.cache(lambda name: write(tmp_path_factory.mktemp("model"), **MODELS[name]))


def copy(path, to, change, rewrite=lambda tensors: None):
    """The checkpoint with other keys in config.json, and tensors that were rewritten."""
    config = json.loads((path / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | change))
    tensors = load_file(path / "model.safetensors")
    rewrite(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def stop(path):
    with pytest.raises(errors.FatalError) as stopped:
        threads.run(lambda comm: load(path, mesh.build(comm, 1, 1)), 1)
    assert stopped.value.code == errors.MODEL
    return str(stopped.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name, change, message", REFUSED)
def test_configs(made, tmp_path, name, change, message):
    assert message in stop(copy(made(name), tmp_path, change))


TYPES = {options["model_type"]: options for options in reversed(MODELS.values())} | {
    "llama": COMMON | {"model_type": "llama"}, "qwen3": COMMON | {"model_type": "qwen3"},
    "kimi_k2": MODELS["deepseek_v3"] | {"model_type": "deepseek_v3"}, "chatglm": test_chatglm.CONFIG,
    "bailing_moe": test_bailing_moe.CONFIG, "internlm2": COMMON | {"model_type": "internlm2"},
    "qwen": COMMON | {"model_type": "qwen"}, "baichuan": COMMON | {"model_type": "baichuan"},
    "apertus1p5_text": COMMON | MODELS["apertus1p5_text"],
    "apertus1p5": {"model_type": "apertus1p5", "text_config": COMMON | MODELS["apertus1p5_text"], "vision_config": {}},
    "step3p5": MODELS["step3p7"]["text_config"] | {"model_type": "step3p5"},
    "glm5_next_text": MODELS["glm5_next"]["text_config"] | {"model_type": "glm5_next_text", "index_topk": 32},
    "mimo": COMMON | {"model_type": "qwen2"}, "moondream1": test_moondream1.CONFIG,
    "blip": {"model_type": "blip", "text_config": test_blip.TEXT, "vision_config": {}},
}  # fmt: skip


def changed(tmp_path, model_type, change):
    """Build a model whose config.json has other keys, of a multimodal one those of the text. Raises FatalError."""
    options = deepcopy(TYPES[model_type])
    if options["model_type"] in transformers.CONFIG_MAPPING:
        options = options_of(**options)
        options = transformers.AutoConfig.for_model(**options).to_dict() | {"model_type": model_type}
    change(options.get("text_config", options))
    (tmp_path / "config.json").write_text(json.dumps(options))
    build(read_config(tmp_path), GroupRank(0, 1), GroupRank(0, 1))


ODD = ("x", -1, 0, 1.5, [], {}, True, [1], ["x"], float("inf"), float("nan"), 1 << 70, {"a": [1]})
ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "partial_rotary_factor": 0.5, "attention_factor": 1.0,
}  # fmt: skip


@pytest.mark.sample(200)
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_no_value_of_config_json_raises_another_error(tmp_path, model_type, value):
    keys: set[str] = set()
    changed(tmp_path, model_type, keys.update)
    changes = [{key: value} for key in sorted(keys - {"model_type"})]
    changes += [{"rope_parameters": ROPE | {key: value}} for key in ROPE]
    changes += [{"rope_parameters": ROPE | {"rope_type": kind, "factor": value}} for kind in ("linear", "dynamic")]
    wrong = 0
    for change in changes:
        try:
            changed(tmp_path, model_type, lambda text, change=change: text.update(change))
        except errors.FatalError as stopped:
            wrong += 1
            assert stopped.code in (errors.MODEL, errors.USAGE), change
    assert wrong >= (3 if model_type == "moondream1" else 5)  # Moondream has few keys


def test_all_types_are_here():
    assert set(TYPES) == set(architectures.supported())


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", TYPES)
def test_configs_as_they_are(tmp_path, model_type):
    """So that what is refused below is what was changed."""
    changed(tmp_path, model_type, lambda text: None)


@pytest.mark.sample(4)
@pytest.mark.parametrize("model_type", [one for one in TYPES if one not in UNROTATED])
def test_unknown_rope_types(tmp_path, model_type):
    def spiral(text):
        rope = text.setdefault("rope_parameters", {})
        for one in [one for one in rope.values() if isinstance(one, dict)] or [rope]:
            one["rope_type"] = "spiral"

    with pytest.raises(errors.FatalError, match="'spiral'") as stopped:
        changed(tmp_path, model_type, spiral)
    assert stopped.value.code == errors.MODEL


def per_layer_type(model_type):
    keys = architectures.config_keys(model_type)
    return architectures.config_keys(keys.text_type or model_type).rope_per_layer_type


@pytest.mark.sample(4)
@pytest.mark.parametrize("model_type", [one for one in TYPES if not per_layer_type(one)])
def test_ropes_that_differ_between_layers(tmp_path, model_type):
    def layered(text):
        ropes = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
        text["rope_parameters"] = ropes

    with pytest.raises(errors.FatalError, match="parameters.*full_attention") as stopped:
        changed(tmp_path, model_type, layered)
    assert stopped.value.code == errors.MODEL


@pytest.mark.sample(4)
@pytest.mark.parametrize("model_type", TYPES)
def test_unknown_activations(tmp_path, model_type):
    keys = ("hidden_act", "hidden_activation", "activation", "activation_function", "mlp_hidden_act")

    def sine(text):
        given = [key for key in keys if key in text] or ["hidden_act"]
        text.update(dict.fromkeys(given, "sine"))

    with pytest.raises(errors.FatalError, match="(activation|hidden_act) 'sine' is not supported") as stopped:
        changed(tmp_path, model_type, sine)
    assert stopped.value.code == errors.MODEL


@pytest.mark.parametrize("name, tensor", MISSING)
def test_missing_tensors(made, tmp_path, name, tensor):
    assert stop(copy(made(name), tmp_path, {}, lambda tensors: tensors.pop(tensor))).endswith(f"has no tensor {tensor}")


@pytest.mark.parametrize("name, tensor", MISSING)
def test_misshapen_tensors(made, tmp_path, name, tensor):
    before = []

    def cut(tensors):
        before.extend(tensors[tensor].shape)
        tensors[tensor] = tensors[tensor][1:].clone()

    message = stop(copy(made(name), tmp_path, {}, cut))
    shapes = [" x ".join(map(str, shape)) for shape in ((before[0] - 1, *before[1:]), before)]
    assert message.endswith(f"{tensor} is {shapes[0]}, expected {shapes[1]}")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_weights_in_pickles(made, tmp_path, name):
    path = copy(made("phi"), tmp_path, {})
    (path / "model.safetensors").rename(path / name)
    (path / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    assert re.search(f"{name}.*pickled", stop(path))


@pytest.mark.parametrize("name, words", [
    ("model-Q4_K_M.gguf", "; a GGUF file is served by its own path: {}"),
    ("consolidated.safetensors", "; consolidated.safetensors is not read without an index"),
])  # fmt: skip
def test_weights_by_other_names(made, tmp_path, name, words):
    path = copy(made("phi"), tmp_path, {})
    (path / "model.safetensors").rename(path / name)
    assert words.format(path / name) in stop(path)


@pytest.mark.parametrize("name, share", [("phi", 0.5), ("stablelm", 0.25)])
def test_how_much_of_a_head_is_rotated_where_config_json_does_not_say(made, tmp_path, name, share):
    change = {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": None}
    config = read_config(copy(made(name), tmp_path, change))
    assert config.raw["rope_parameters"]["partial_rotary_factor"] == share


def test_how_much_of_a_head_minimax_m2_rotates_where_rotary_dim_alone_says_it(made, tmp_path):
    path = copy(made("minimax_m2"), tmp_path, {"rope_parameters": None, "rope_theta": 10000.0})
    args = minimax_m2.Args.from_config(read_config(path))
    assert args.rope(0) == {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
