"""Every architecture: f32 logits equal transformers' within 1e-4, however the model is cut; greedy tokens are equal."""

import pytest
import torch
import transformers
from phalanx.rank.model import architectures

from .harness import distance, run_steps, tokens

TOLERANCE = 1e-4
COMMON = dict(
    hidden_size=48, intermediate_size=100, num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=6,
    vocab_size=512, max_position_embeddings=512, bos_token_id=0, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0,
    "short_factor": [1.0, 1.7], "long_factor": [2.0, 8.0],
}  # fmt: skip
# What each is tested with besides; several sets where an architecture has several shapes.
MODELS = {
    "qwen2": dict(model_type="qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=2),
    "gemma2": dict(
        model_type="gemma2", head_dim=16, query_pre_attn_scalar=24, sliding_window=11, attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
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
    "qwen3_moe": dict(
        model_type="qwen3_moe", head_dim=8, num_experts=10, num_experts_per_tok=4, moe_intermediate_size=28,
        norm_topk_prob=True, decoder_sparse_step=2,
    ),
    "qwen3_moe unnormalised": dict(
        model_type="qwen3_moe", head_dim=8, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=28,
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=6, num_experts_per_tok=2, sliding_window=11),
}  # fmt: skip


def write(directory, **options):
    """A checkpoint of random weights, as transformers writes it."""
    model_type = options.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **options})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 * (2 if "lm_head" in name or "embed" in name else 1))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint, made once."""
    found = {}

    def make(name):
        if name not in found:
            found[name] = write(tmp_path_factory.mktemp(name.replace(" ", "-")), **MODELS[name])
        return found[name]

    return make


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_logits(made, expected, name, tp, pp):
    path, ids = made(name), tokens(60)
    (logits,) = run_steps(path, [ids], tp=tp, pp=pp, max_model_len=512)
    assert distance(logits, expected(path, ids)) < TOLERANCE


def test_longrope_beyond_the_original_context(tmp_path, expected):
    """The longest sequence that is served decides on the list of factors."""
    path = write(
        tmp_path, model_type="phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32,
        max_position_embeddings=256,
    )  # fmt: skip
    ids = tokens(100)
    (logits,) = run_steps(path, [ids])
    assert distance(logits, expected(path, ids)) < TOLERANCE


def test_each_architecture_is_here():
    elsewhere = {"llama", "qwen3"}  # test_fidelity.py
    assert {options["model_type"] for options in MODELS.values()} | elsewhere == set(architectures.supported())
