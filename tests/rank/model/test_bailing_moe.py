"""Ling 1 and 2 beside a plain torch model of their published definition, which transformers does not have."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, silu

from .harness import distance, run_steps, tokens
from .test_chatglm import attend

CONFIG = dict(
    model_type="bailing_moe", hidden_size=48, intermediate_size=100, num_hidden_layers=4, num_attention_heads=12,
    num_key_value_heads=6, head_dim=8, vocab_size=512, max_position_embeddings=512, num_experts=16,
    num_shared_experts=2, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True,
    rms_norm_eps=1e-6, rope_theta=6e5, use_qkv_bias=False, use_bias=False, norm_head=False, tie_word_embeddings=False,
    torch_dtype="float32",
)  # fmt: skip
V2 = dict(
    score_function="sigmoid", moe_router_enable_expert_bias=True, n_group=4, topk_group=2, routed_scaling_factor=2.5,
    use_qk_norm=True, partial_rotary_factor=0.5, first_k_dense_replace=1, num_shared_experts=1,
)  # fmt: skip
MODELS = {
    "Ling": dict(num_shared_experts=0),
    "Ling biased": dict(use_bias=True, norm_topk_prob=False),
    "Ling 2": V2,
    "Ling 2 of 1T": V2 | dict(partial_rotary_factor=None, rotary_dim=4, moe_shared_expert_intermediate_size=28),
}


def make(directory, **changes):
    """A checkpoint of random weights in the published form; returns its tensors."""
    config, generator, weights = CONFIG | changes, torch.Generator().manual_seed(1), {}
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(name, outputs, inputs, bias=False, scale=1.0):
        weights[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * scale * inputs**-0.5
        if bias:
            weights[f"{name}.bias"] = torch.randn(outputs, generator=generator) / 2

    def norm(name, size=hidden):
        weights[f"{name}.weight"] = 1 + torch.randn(size, generator=generator) / 5

    def mlp(name, inner):
        matrix(f"{name}.gate_proj", inner, hidden)
        matrix(f"{name}.up_proj", inner, hidden)
        matrix(f"{name}.down_proj", hidden, inner)

    matrix("model.word_embeddings", config["vocab_size"], hidden, scale=2)
    for i in range(config["num_hidden_layers"]):
        layer, inner = f"model.layers.{i}", config["moe_intermediate_size"]
        norm(f"{layer}.input_layernorm")
        matrix(f"{layer}.attention.query_key_value", (heads + 2 * groups) * dim, hidden, config["use_bias"], 1.5)
        matrix(f"{layer}.attention.dense", hidden, heads * dim, config["use_bias"])
        if config.get("use_qk_norm"):
            norm(f"{layer}.attention.query_layernorm", dim)
            norm(f"{layer}.attention.key_layernorm", dim)
        norm(f"{layer}.post_attention_layernorm")
        if i < config.get("first_k_dense_replace", 0):
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        matrix(f"{layer}.mlp.gate", config["num_experts"], hidden)
        if config.get("moe_router_enable_expert_bias"):
            weights[f"{layer}.mlp.gate.expert_bias"] = torch.randn(config["num_experts"], generator=generator) / 3
        for expert in range(config["num_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", inner)
        if shared := config["num_shared_experts"]:
            mlp(f"{layer}.mlp.shared_experts", shared * config.get("moe_shared_expert_intermediate_size", inner))
    norm("model.norm")
    matrix("lm_head", config["vocab_size"], hidden, scale=2)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return weights


def rotate(x, config):
    """x [T, heads, dim], whose first elements are rotated in two halves."""
    size = config.get("rotary_dim") or int(x.shape[-1] * (config.get("partial_rotary_factor") or 1))
    angles = torch.arange(len(x))[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :size].chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., size:]), -1)


def weigh(x, weights, name, config):
    """The experts' weights of each token, [T, experts]; 0 for those that it does not visit."""
    logits, count = linear(x, weights[f"{name}.weight"]), config["num_experts"]
    if config.get("score_function") == "sigmoid":
        scores = logits.sigmoid()
        choice = (scores + weights[f"{name}.expert_bias"]).unflatten(1, (config["n_group"], -1))
        best = choice.topk(2, 2).values.sum(2).topk(config["topk_group"], 1).indices
        kept = torch.zeros(len(x), config["n_group"], dtype=torch.bool).scatter(1, best, True)
        choice = choice.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    else:
        choice = scores = logits.softmax(1)
    chosen = torch.zeros(len(x), count).scatter(1, choice.topk(config["num_experts_per_tok"], 1).indices, 1.0)
    made = scores * chosen
    made = made / made.sum(1, keepdim=True) if config["norm_topk_prob"] else made
    return made * config.get("routed_scaling_factor", 1.0)


def logits_of(weights, config, ids):
    eps, heads, groups = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]

    def apply(name, x):
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def normed(name, x):
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps) if f"{name}.weight" in weights else x

    def mlp(name, x):
        return apply(f"{name}.down_proj", silu(apply(f"{name}.gate_proj", x)) * apply(f"{name}.up_proj", x))

    x = weights["model.word_embeddings.weight"][torch.tensor(ids)]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        qkv = apply(f"{layer}.attention.query_key_value", normed(f"{layer}.input_layernorm", x))
        q, k, v = qkv.unflatten(1, (-1, config["head_dim"])).split([heads, groups, groups], 1)
        q, k = (normed(f"{layer}.attention.{one}_layernorm", y) for one, y in (("query", q), ("key", k)))
        x = x + apply(f"{layer}.attention.dense", attend(rotate(q, config), rotate(k, config), v))
        h = normed(f"{layer}.post_attention_layernorm", x)
        if i < config.get("first_k_dense_replace", 0):
            x = x + mlp(f"{layer}.mlp", h)
            continue
        each = weigh(h, weights, f"{layer}.mlp.gate", config)
        x = x + sum(each[:, n, None] * mlp(f"{layer}.mlp.experts.{n}", h) for n in range(config["num_experts"]))
        if config["num_shared_experts"]:
            x = x + mlp(f"{layer}.mlp.shared_experts", h)
    return apply("lm_head", normed("model.norm", x))


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp, pp, ep", [(1, 1, 1), (2, 1, 2), (3, 1, 1), (1, 2, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_logits(tmp_path, name, tp, pp, ep):
    weights, ids = make(tmp_path, **MODELS[name]), tokens(60)
    steps = [[(0, 33)], [(0, 23)], *[[(0, 1)]] * 4]
    (found,) = run_steps(tmp_path, [ids], steps, tp=tp, pp=pp, ep=ep)
    assert distance(found, logits_of(weights, CONFIG | MODELS[name], ids)) < 1e-4
