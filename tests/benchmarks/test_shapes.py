"""The quantised checkpoints that benchmarks load with random codes, of small models."""

import json

import pytest
import torch
from phalanx.benchmarks.shapes import CONFIGS, QUANTIZED

from ..rank.model.harness import run_steps, tokens
from ..rank.model.stored_formats.test_stored import loaded

SMALL = dict(
    hidden_size=256, intermediate_size=512, moe_intermediate_size=256, head_dim=64, num_attention_heads=4,
    num_key_value_heads=2, num_hidden_layers=1, num_experts=4, num_experts_per_tok=2, vocab_size=64,
)  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("config", ["tiny", "qwen3-30b-a3b"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantised_checkpoints(tmp_path, name, config):
    held = []
    for settings in ({}, {"quantization_config": QUANTIZED[name]}):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[config] | SMALL | settings))
        (model,) = loaded(tmp_path, 1, load_format="dummy")
        held.append(model.weight_bytes)
    eight_bits = "8" in name
    assert held[1] < (0.32 if eight_bits else 0.2) * held[0]  # which is f32
    (logits,) = run_steps(tmp_path, [tokens(20, vocab=64)], load_format="dummy")
    assert logits.isfinite().all()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_of_quantised_checkpoints_are_like_plain_ones(tmp_path, name):
    """Equally large weights of mean 0: else all tokens became alike, and chose the same experts."""
    config = CONFIGS["qwen3-30b-a3b"] | SMALL | {"quantization_config": QUANTIZED[name]}
    config |= dict(hidden_size=512, num_hidden_layers=4, vocab_size=512)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (model,) = loaded(tmp_path, 1, load_format="dummy")
    weights = model.get_submodule("model.layers.0.self_attn.qkv_proj")(torch.eye(512))
    assert abs(weights.std() * 512**0.5 - 1) < 0.05
    logits = torch.cat(run_steps(tmp_path, [[token] for token in range(20)], load_format="dummy"))
    assert (torch.corrcoef(logits) - torch.eye(20)).abs().mean() < 0.2


@pytest.mark.parametrize("config, changes", [
    ("glm-4.7-flash", dict(
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32, n_routed_experts=8,
        num_key_value_heads=4, num_hidden_layers=2,
    )),
    ("nemotron-3-nano", dict(
        hybrid_override_pattern="ME*E", num_hidden_layers=4, mamba_num_heads=4, mamba_head_dim=16, n_groups=2,
        ssm_state_size=16, n_routed_experts=8, moe_shared_expert_intermediate_size=64,
    )),
])  # fmt: skip
def test_random_routers_choose_experts_evenly(tmp_path, config, changes):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[config] | SMALL | changes))
    (model,) = loaded(tmp_path, 1, load_format="dummy")
    corrections = [one for name, one in model.named_parameters() if name.endswith("e_score_correction_bias")]
    assert corrections and not any(one.any() for one in corrections)
    (logits,) = run_steps(tmp_path, [tokens(20, vocab=64)], load_format="dummy")
    assert logits.isfinite().all() and logits.std() > 0.1
