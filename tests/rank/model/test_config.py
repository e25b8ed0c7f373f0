"""config.json, good and bad, as a user meets it."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from phalanx import errors
from phalanx.rank.model.architectures import supported
from phalanx.rank.model.config import check_degrees, read_config, tensor_degrees
from phalanx.rank.options import STORED
from phalanx.rank.safetensors_header import INDEX, SINGLE
from safetensors.numpy import save_file

from ...checkpoints import make_config, to_old_style


def write(directory, config):
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def stop(path):
    with pytest.raises(errors.FatalError) as stopped:
        read_config(path)
    assert stopped.value.code == errors.MODEL
    return str(stopped.value)


def test_needs_no_torch():
    """The launcher and rank 0 read it before, or without, paying for the import."""
    code = "import sys, phalanx.rank.model.config; assert not {'torch', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_both_styles_say_the_same(tmp_path, rope):
    parameters = {"rope_type": rope, "rope_theta": 5e5}
    if rope != "default":
        parameters["factor"] = 4.0
    config = make_config("llama", rope_parameters=parameters, dtype="bfloat16")
    new = read_config(write(tmp_path, config))
    old_config = to_old_style(config)
    assert "rope_parameters" not in old_config and "dtype" not in old_config
    old = read_config(write(tmp_path, old_config))
    assert new.raw["rope_parameters"] == old.raw["rope_parameters"]
    original = 512 if rope in ("llama3", "yarn") else None
    assert new.raw["rope_parameters"].get("original_max_position_embeddings") == original
    assert (new.dtype, new.max_positions) == (old.dtype, old.max_positions) == ("bf16", new.max_positions)


def test_the_oldest_style_says_type(tmp_path):
    config = to_old_style(make_config("llama")) | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_config(write(tmp_path, config)).raw["rope_parameters"] == {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "rope, positions",
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.5}, 1280),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
    ],
)
def test_max_positions_include_scaling(tmp_path, rope, positions):
    assert read_config(write(tmp_path, make_config("llama", rope_parameters=rope))).max_positions == positions


def test_ropes_of_layer_types_in_both_styles(tmp_path):
    """Gemma 3's older config.json has full attention's scaling, sliding layers' base, and the scaled length."""
    config = to_old_style(make_config("llama")) | {"model_type": "gemma3_text", "rope_theta": None}
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2e4}
    old = read_config(write(tmp_path, config))
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    assert (old.raw["rope_parameters"], old.max_positions) == (ropes, 512)
    new = read_config(write(tmp_path, make_config("llama", rope_parameters=ropes) | {"model_type": "gemma3_text"}))
    assert (new.raw["rope_parameters"], new.max_positions) == (ropes, 512)


def test_the_text_model_of_a_multimodal_one(tmp_path):
    """The keys that Gemma 3 4B's config.json has, and what it leaves out."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    whole = {
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1},
    }
    found = read_config(write(tmp_path, whole))
    assert (found.model_type, found.hidden_size, found.num_layers, found.dtype) == ("gemma3", 2560, 34, "bf16")
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.vocab_size) == (8, 4, 256, 262208)
    assert found.max_positions == 131072
    assert found.raw["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    # Qwen3-VL's file has what its text model leaves out, as that has none of its own.
    text = make_config("llama", head_dim=None) | {"model_type": "qwen3_vl_text"}
    found = read_config(write(tmp_path, {"model_type": "qwen3_vl", "text_config": text}))
    assert (found.raw["model_type"], found.head_dim) == ("qwen3_vl_text", 128)
    whole["quantization_config"] = {"quant_method": "aqlm"}
    words = f"{tmp_path}: quantised weights (aqlm) are not supported; supported are {', '.join(STORED)}: serve"
    assert stop(write(tmp_path, whole)).startswith(words)


BESIDE = {
    "quantize_config.json": {"bits": 4},
    "quant_config.json": {"w_bit": 4},
    "hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}},
}
LINEAR = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("file, tensor, method", [
    ("quantize_config.json", "qweight", "gptq"), ("quantize_config.json", "B", "gptq"),
    ("quantize_config.json", "weight", ""), ("quantize_config.json", "weight_scale", ""),
    ("quant_config.json", "qweight", "awq"), ("quant_config.json", "weight", ""),
    ("hf_quant_config.json", "weight_scale", "modelopt"), ("hf_quant_config.json", "weight", ""),
])  # fmt: skip
def test_files_of_quantisation_are_believed_where_tensors_say_so(tmp_path, indexed, file, tensor, method):
    (tmp_path / file).write_text(json.dumps(BESIDE[file]))
    name = f"{LINEAR}.{tensor}"
    if indexed:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: "model-00001-of-00001.safetensors"}}))
    else:
        save_file({name: np.zeros(2, np.float32)}, tmp_path / SINGLE)
    found = read_config(write(tmp_path, make_config("llama")))
    assert found.quantization.get("quant_method", "") == method
    assert found.ignored_file == ("" if method else file)


def test_files_of_quantisation_are_believed_where_there_are_no_weights(tmp_path):
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    assert read_config(write(tmp_path, make_config("llama"))).quantization["quant_method"] == "gptq"


def test_dimensions_and_defaults(tmp_path):
    config = make_config("llama")
    for key in ("num_key_value_heads", "head_dim", "dtype", "rope_parameters"):
        config[key] = None
    found = read_config(write(tmp_path, config))
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.hidden_size) == (12, 12, 4, 48)
    assert (found.dtype, found.vocab_size, found.num_layers) == ("f32", 512, 4)
    assert found.raw["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_missing_and_garbled_files(tmp_path):
    assert re.search(f"directory.*{tmp_path}/none", stop(tmp_path / "none"))
    assert re.search(f"{tmp_path} .*no config.json", stop(tmp_path))
    message = stop(write(tmp_path, '{"model_type": "llama",'))
    assert f"{tmp_path}/config.json is not valid" in message and "line 1" in message
    assert re.search(f"{tmp_path}/config.json.*list", stop(write(tmp_path, "[]")))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "bert"}, "{}: model type 'bert' is not supported; supported are {}"),
        ({"model_type": None}, "{}: model type None is not supported; supported are {}"),
        ({"model_type": "..config"}, "{}: model type '..config' is not supported; supported are {}"),
        ({"hidden_size": None}, "{}/config.json has no hidden_size"),
        ({"vocab_size": "many"}, "{}/config.json: vocab_size is 'many', not a positive integer"),
        ({"num_hidden_layers": 0}, "{}/config.json: num_hidden_layers is 0, not a positive integer"),
        ({"num_key_value_heads": 5}, "{}/config.json: 12 attention heads cannot share 5 key heads evenly"),
        ({"head_dim": None, "hidden_size": 50}, "{}/config.json: hidden_size 50 is not a multiple of its 12 heads"),
        ({"dtype": "fp8"}, "{}/config.json: dtype fp8 is not supported; supported are float32, bfloat16, float16"),
        ({"rope_parameters": 3}, "{}/config.json: the rope parameters are 3, not an object"),
        (
            {"rope_parameters": {"local": {"rope_type": "default"}}},
            "{}/config.json: rope parameter local is {{'rope_type': 'default'}}, not a number",
        ),
        (
            {"rope_parameters": {"full_attention": {"factor": "two"}}},
            "{}/config.json: rope parameter factor is 'two', not a positive number",
        ),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": 3}},
            "{}/config.json: the rope parameters of sliding_attention are 3, not an object",
        ),
        (
            {"rope_parameters": {"rope_type": ["yarn"]}},
            "{}/config.json: rope parameter rope_type is ['yarn'], not a name",
        ),
        (
            {"rope_parameters": {"rope_theta": -1}},
            "{}/config.json: rope parameter rope_theta is -1, not a positive number",
        ),
        (
            {"rope_parameters": None, "rope_theta": [1e4]},
            "{}/config.json: rope parameter rope_theta is [10000.0], not a positive number",
        ),
        (
            {"partial_rotary_factor": 0},
            "{}/config.json: rope parameter partial_rotary_factor is 0, not a positive number",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": 1.0}},
            "{}/config.json: rope parameter short_factor is 1.0, not a list",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": [1]}},
            "{}/config.json: rope parameter mscale is [1], not a number",
        ),
        ({"text_config": "llama"}, "{}/config.json: text_config is 'llama', not an object"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "two"}},
            "{}/config.json: rope parameter factor is 'two', not a positive number",
        ),
    ],
)
def test_wrong_values_are_named(tmp_path, change, message):
    told = stop(write(tmp_path, make_config("llama") | change))
    assert told.startswith(message.format(tmp_path, ", ".join(supported())))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"num_experts": 10**9},
        {"n_routed_experts": [10**9]},
        {"vocab_size": 10**9},
        {"hidden_size": 10**9},
        {"num_attention_heads": 12 * 10**8},
        {"intermediate_size": 10**12},
        {"ffn": {"moe_num_experts": 10**9}},
        {"max_position_embeddings": 10**12},
        {"sliding_window": 10**30},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e300}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e14}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 1e12, "original_max_position_embeddings": 4096}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": float("inf")}},
        {"rope_parameters": {"rope_type": "llama3", "factor": float("nan")}},
    ],
    ids=str,
)
def test_sizes_beyond_any_model_are_refused_before_anything_is_built(tmp_path, change):
    name = next(iter(next(iter(change.values())) if isinstance(next(iter(change.values())), dict) else change))
    said = stop(write(tmp_path, make_config("llama") | change))
    assert "config.json" in said
    assert name in said or "rope" in said
    assert len(said) < 400


def test_configs_that_are_nested_too_deeply(tmp_path):
    for text in ("[" * 100_000, '{"a":' * 100_000):
        assert "nested" in stop(write(tmp_path, text))


def test_tensor_degrees(tmp_path):
    assert tensor_degrees(12, 6) == [1, 2, 3, 6, 12]
    assert tensor_degrees(12, 4) == [1, 2, 4, 12]
    assert tensor_degrees(12, 1) == [1, 2, 3, 4, 6, 12]
    assert tensor_degrees(32, 8) == [1, 2, 4, 8, 16, 32]
    config = read_config(write(tmp_path, make_config("llama")))
    check_degrees(config, 6, 4)
    with pytest.raises(errors.FatalError) as stopped:
        check_degrees(config, 4, 1)
    assert "--tp 4" in str(stopped.value)
    assert stopped.value.code == errors.USAGE
    with pytest.raises(errors.FatalError, match="--pp 5.*pipeline.*\\(4\\)"):
        check_degrees(config, 1, 5)
