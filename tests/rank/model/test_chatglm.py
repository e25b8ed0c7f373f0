"""ChatGLM beside a plain torch model of its published definition: transformers has no class for it any more."""

import json
import math

import pytest
import torch
from phalanx import errors
from phalanx.rank.model.config import read_config
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, silu

from .harness import distance, run_steps, tokens

CONFIG = dict(
    model_type="chatglm", _name_or_path="THUDM/chatglm3-6b", hidden_size=48, num_layers=4, num_attention_heads=6,
    multi_query_attention=True, multi_query_group_num=1, kv_channels=16, ffn_hidden_size=100, padded_vocab_size=512,
    vocab_size=500, seq_length=512, layernorm_epsilon=1e-5, rmsnorm=True, post_layer_norm=True, add_bias_linear=False,
    add_qkv_bias=True, apply_residual_connection_post_layernorm=False, tie_word_embeddings=False, original_rope=True,
    torch_dtype="float32", quantization_bit=0, pre_seq_len=None,
)  # fmt: skip
MODELS = {
    "chatglm3": dict(),
    "glm4": dict(rope_ratio=500, kv_channels=8, layernorm_epsilon=1.5625e-07),
    "chatglm2 long": dict(_name_or_path="THUDM/chatglm2-6b-32k", rope_ratio=4, multi_query_group_num=6),
    "other rotation and biases": dict(original_rope=False, add_bias_linear=True, add_qkv_bias=False),
}


def make(directory, **changes):
    """A checkpoint of random weights in the published form; returns its tensors."""
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(1)
    hidden, inner, dim = config["hidden_size"], config["ffn_hidden_size"], config["kv_channels"]
    heads, groups = config["num_attention_heads"], config["multi_query_group_num"]
    weights = {}

    def matrix(name, outputs, inputs, bias=False, scale=1.0):
        weights[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * scale * inputs**-0.5
        if bias:
            weights[f"{name}.bias"] = torch.randn(outputs, generator=generator) / 2

    def norm(name):
        weights[f"{name}.weight"] = 1 + torch.randn(hidden, generator=generator) / 5

    matrix("transformer.embedding.word_embeddings", config["padded_vocab_size"], hidden, scale=2)
    biased = config["add_bias_linear"]
    for i in range(config["num_layers"]):
        layer = f"transformer.encoder.layers.{i}"
        norm(f"{layer}.input_layernorm")
        qkv_bias = biased or config["add_qkv_bias"]
        matrix(f"{layer}.self_attention.query_key_value", (heads + 2 * groups) * dim, hidden, qkv_bias, 1.5)
        matrix(f"{layer}.self_attention.dense", hidden, heads * dim, biased)
        norm(f"{layer}.post_attention_layernorm")
        matrix(f"{layer}.mlp.dense_h_to_4h", 2 * inner, hidden, biased)
        matrix(f"{layer}.mlp.dense_4h_to_h", hidden, inner, biased)
    norm("transformer.encoder.final_layernorm")
    matrix("transformer.output_layer", config["padded_vocab_size"], hidden, scale=2)
    extra = {"transformer.rotary_pos_emb.inv_freq": torch.ones(dim // 4)}
    save_file(weights | extra, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return weights


def rotate(x, config):
    """x [T, heads, dim], its first half rotated by angles position * base ** (-2 i / (dim / 2))."""
    half = x.shape[-1] // 2
    positions, ratio = torch.arange(len(x)).float(), config.get("rope_ratio", 1)
    base = 10000.0
    if "chatglm2" in config["_name_or_path"]:
        positions = positions / ratio
    else:
        base *= ratio
    angles = (positions[:, None] * base ** (-torch.arange(0, half, 2) / half))[:, None]
    cos, sin = angles.cos(), angles.sin()
    turned = x[..., :half]
    if config["original_rope"]:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, x[..., half:]), -1)


def attend(q, k, v):
    """Causal attention of q [T, heads, dim] to k, v [T, groups, dim]: heads of a group are neighbours."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v).flatten(1)


def logits_of(weights, config, ids):
    eps, dim = config["layernorm_epsilon"], config["kv_channels"]
    heads, groups = config["num_attention_heads"], config["multi_query_group_num"]

    def apply(name, x):
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def normed(name, x):
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps)

    x = weights["transformer.embedding.word_embeddings.weight"][torch.tensor(ids)]
    for i in range(config["num_layers"]):
        layer = f"transformer.encoder.layers.{i}"
        qkv = apply(f"{layer}.self_attention.query_key_value", normed(f"{layer}.input_layernorm", x))
        q, k, v = qkv.view(len(ids), -1, dim).split([heads, groups, groups], 1)
        x = x + apply(f"{layer}.self_attention.dense", attend(rotate(q, config), rotate(k, config), v))
        gate, up = apply(f"{layer}.mlp.dense_h_to_4h", normed(f"{layer}.post_attention_layernorm", x)).chunk(2, -1)
        x = x + apply(f"{layer}.mlp.dense_4h_to_h", silu(gate) * up)
    return apply("transformer.output_layer", normed("transformer.encoder.final_layernorm", x))


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_logits(tmp_path, caplog, name, tp, pp):
    change = MODELS[name]
    weights, ids = make(tmp_path, **change), tokens(60)
    expected = logits_of(weights, CONFIG | change, ids)
    assert expected.std() >= 1
    (logits,) = run_steps(tmp_path, [ids], tp=tp, pp=pp)
    assert distance(logits, expected) < 1e-4
    assert not caplog.records, "all tensors are used"


def test_step_by_step(tmp_path):
    change, ids = dict(multi_query_group_num=2), tokens(20)
    weights = make(tmp_path, **change)
    (logits,) = run_steps(tmp_path, [ids], [[(0, 7)], *[[(0, 1)]] * 13], tp=2)
    assert distance(logits, logits_of(weights, CONFIG | change, ids)) < 1e-4


def test_config(tmp_path):
    make(tmp_path)
    config = read_config(tmp_path)
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (4, 1, 16)
    assert (config.vocab_size, config.max_positions) == (512, 512), "the padded vocabulary counts"


@pytest.mark.parametrize("change, message", [
    ({"position_encoding_2d": True}, "position_encoding_2d True is not supported for this model type"),
    ({"rmsnorm": False}, "rmsnorm False is not supported"),
    ({"multi_query_attention": False}, "multi_query_attention False is not supported"),
    ({"quantization_bit": 4}, "quantization_bit 4 is not supported"),
    ({"pre_seq_len": 128}, "pre_seq_len 128 is not supported"),
    ({"num_layers": None}, "config.json has no num_layers"),
    ({"layernorm_epsilon": "small"}, "layernorm_epsilon is 'small', expected float"),
    ({"ffn_hidden_size": 96}, "dense_h_to_4h.weight is 200 x 48, expected 192 x 48"),
])  # fmt: skip
def test_what_is_refused(tmp_path, change, message):
    make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(errors.FatalError) as stopped:
        run_steps(tmp_path, [[1]])
    assert message in str(stopped.value) and stopped.value.code == errors.MODEL
