"""Meanings of config.json where it leaves a key out, or has null there: the same as to transformers' config classes."""

import dataclasses
import json

import pytest
import transformers
from phalanx.errors import FatalError
from phalanx.rank.model import architectures
from phalanx.rank.model.config import read_config

from .harness import distance, run_steps, tokens
from .test_architectures import MODELS, TOLERANCE, options_of, write
from .test_refused import TYPES

# transformers has no class of the others, or one whose text_config must be whole.
KNOWN = sorted(one for one in TYPES if one in transformers.CONFIG_MAPPING and "text_config" not in TYPES[one])
# Tensors' shapes say these; and a context that config.json does not give is short here, whatever the class says.
SIZES = {
    "max_position_embeddings",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "word_embed_proj_dim",
    "ffn_hidden_size",
}
SIZES |= {"linear_head_dim", "mamba_n_heads", "mamba_d_head", "mamba_d_ssm"}
SIZES |= {"time_step_limit"}  # which is refused where it says anything
# Keys whose meaning is in the windows, the experts and the ropes of the layers.
OF_LAYERS = {"layer_types", "max_window_layers", "no_rope_layers", "sliding_window_pattern", "rope_parameters"}
OF_LAYERS |= {
    "full_attn_idxs",
    "moe_layers",
    "moe_layer_end_index",
    "hybrid_override_pattern",
    "mlp_layer_types",
    "compress_ratios",
    "moe_layer_freq",
    "sparse_attention_freq",
    "indexer_types",
    "per_layer_config",
    "global_head_dim",
    "num_global_key_value_heads",
}
# Without experts a model is dense, and its checkpoint lacks tensors.
NUMBERS = {"num_experts", "num_local_experts", "n_routed_experts"}


def meaning(directory, config):
    """The model that config.json describes: its Args, and of each layer the attention's parameters and the rope."""
    (directory / "config.json").write_text(json.dumps(config))
    found = read_config(directory)
    args = architectures.find(found.model_type).Args.from_config(found)
    ropes = [{"partial_rotary_factor": 1.0} | args.rope(i) for i in range(args.num_hidden_layers)]
    sparse = getattr(args, "sparse", lambda index: None)  # whether a layer has experts
    chunk = getattr(args, "chunk", lambda index: 0)
    layers = [(args.attention_params(i), rope) for i, rope in enumerate(ropes)]
    names = {field.name for field in dataclasses.fields(args)} - SIZES - OF_LAYERS - NUMBERS - {"sliding_window"}
    indexed = getattr(args, "has_indexer", lambda index: None)
    kinds = [(sparse(i), indexed(i), chunk(i)) for i in range(len(layers))]
    return {name: getattr(args, name) for name in names} | {"layers": layers, "kinds": kinds}


def keys_of(model_type):
    """The keys of config.json that its Args read and that may be left out."""
    theirs = {ours: name for name, ours in architectures.config_keys(model_type).names.items()}
    fields = dataclasses.fields(architectures.find(model_type).Args)
    optional = {one.name for one in fields if one.default is not one.default_factory} - SIZES - OF_LAYERS - NUMBERS
    return sorted(theirs.get(name, name) for name in optional)


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", KNOWN)
def test_keys_that_are_left_out(tmp_path, model_type):
    whole = options_of(**TYPES[model_type])
    wrong = {}
    for key in [*keys_of(model_type), "rope_parameters", "layer_types"]:
        left = {name: value for name, value in whole.items() if name != key}
        try:
            full = transformers.AutoConfig.for_model(**left).to_dict()
            ours, theirs = meaning(tmp_path, left), meaning(tmp_path, full)
        except FatalError as refused:
            assert key == "rope_parameters" and "model type needs" in str(refused)
            continue
        wrong |= {f"{key}: {name}": (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert not wrong


@pytest.mark.parametrize(
    "model_type, key",
    [
        ("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("cohere2", "sliding_window"),
        ("olmo3", "sliding_window"), ("gpt_oss", "sliding_window"), ("qwen2", "sliding_window"),
        ("qwen3_moe", "sliding_window"), ("gemma2", "attn_logit_softcapping"), ("gemma2", "final_logit_softcapping"),
        ("deepseek_v2", "q_lora_rank"), ("deepseek_v3", "q_lora_rank"),
    ],
)  # fmt: skip
def test_nulls(tmp_path, model_type, key):
    whole = options_of(**TYPES[model_type]) | {key: None}
    ours = meaning(tmp_path, whole)
    assert ours == meaning(tmp_path, transformers.AutoConfig.for_model(**whole).to_dict())
    assert not any(params.window for params, _ in ours["layers"]) if key == "sliding_window" else ours[key] is None


@pytest.mark.parametrize("null", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("model_type, kind", [("gpt_oss", "yarn"), ("apertus", "llama3")])
def test_a_null_instead_of_a_scaled_rope(tmp_path, model_type, kind, null):
    """It is scaled all the same."""
    whole = options_of(**TYPES[model_type])
    whole.pop("rope_parameters", None)
    whole[null] = None
    ours = meaning(tmp_path, whole)
    assert ours == meaning(tmp_path, transformers.AutoConfig.for_model(**whole).to_dict())
    assert {rope["rope_type"] for _, rope in ours["layers"]} == {kind}


WINDOWS = dict(use_sliding_window=True, sliding_window=9, max_window_layers=3)
SLIDING = {
    "qwen2": dict(model_type="qwen2") | WINDOWS,
    "qwen3": dict(model_type="qwen3", head_dim=8) | WINDOWS,
    "qwen2_moe": MODELS["qwen2_moe"] | WINDOWS,
    "qwen3_moe": MODELS["qwen3_moe"] | WINDOWS,
}


@pytest.mark.parametrize("name", SLIDING)
def test_which_layers_slide(tmp_path, expected, name):
    """Layers slide by a rule where no list says so. In Qwen2 those from max_window_layers on, of Qwen2-MoE every other
    one below it, of Qwen3-MoE all."""
    path = write(tmp_path, **SLIDING[name])
    config = json.loads((path / "config.json").read_text())
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config))
    ids = tokens(40)
    for pp in (1, 2):
        (logits,) = run_steps(path, [ids], pp=pp)
        assert distance(logits, expected(path, ids)) < TOLERANCE


@pytest.mark.parametrize(
    "keys",
    [{"index_topk_freq": 4, "index_skip_topk_offset": 3}, {"index_topk_freq": 3}, {"index_topk_pattern": "FSSFSFFS"}],
)
def test_which_layers_share_an_indexer(tmp_path, keys):
    given = {name: value for name, value in options_of(**MODELS["glm_moe_dsa"]).items() if name != "indexer_types"}
    given |= keys | {"num_hidden_layers": 8, "mlp_layer_types": ["sparse"] * 8}
    full = transformers.AutoConfig.for_model(**given).to_dict()
    kinds = meaning(tmp_path, given)["kinds"]
    assert kinds == meaning(tmp_path, full)["kinds"] and {indexed for _, indexed, _ in kinds} == {True, False}


@pytest.mark.parametrize("most", [float("inf"), "Infinity", {"__float__": "Infinity"}, 1e30])
def test_time_steps_without_a_limit(tmp_path, most):
    whole = options_of(**TYPES["falcon_h1"])
    assert meaning(tmp_path, whole | {"time_step_limit": [0.0, most]}) == meaning(tmp_path, whole)


def test_published_keys_of_hy3(tmp_path):
    """The published code's names of what transformers calls moe_intermediate_size and mlp_layer_types."""
    whole = options_of(**TYPES["hy_v3"]) | {"expert_hidden_dim": 20, "first_k_dense_replace": 2}
    del whole["moe_intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    args = architectures.find("hy_v3").Args.from_config(read_config(tmp_path))
    assert [args.feed_forward(i).inner for i in range(4)] == [100, 100, 20, 20]
