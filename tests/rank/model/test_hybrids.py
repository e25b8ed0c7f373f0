"""Models whose layers keep states of whole sequences: chunks and mixed batches, what is left out, and what is
refused."""

import functools
import json
import shutil

import pytest
import torch
from phalanx.errors import MODEL, USAGE, FatalError
from phalanx.rank.model.config import read_config
from phalanx.rank.model.measure import GroupRank, build
from safetensors.torch import load_file, save_file

from .harness import distance, run_steps, tokens
from .hybrids import EXPERTS, GLM, HYBRID, HYBRIDS, KIMI, LING
from .test_architectures import COMMON, TOLERANCE, write

GLM_TEXT = GLM | {"model_type": "glm5_next_text"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint, made once."""
    return functools.cache(lambda name: write(tmp_path_factory.mktemp("model"), **HYBRIDS[name]))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name, tp, pp, ep",
    [
        ("qwen3_next", 1, 1, 1),
        ("qwen3_next mixed", 2, 2, 2),
        ("lfm2", 1, 2, 1),
        ("lfm2_moe", 2, 1, 2),
        ("granitemoehybrid", 2, 2, 2),
        ("granitemoehybrid dense", 1, 1, 1),
        ("granitemoehybrid dense", 3, 1, 1),
        ("nemotron_h", 2, 1, 2),
        ("nemotron_h latent", 2, 2, 1),
        ("nemotron_h latent biased", 2, 1, 2),
        ("falcon_h1", 2, 2, 1),
        ("falcon_h1 normed", 1, 1, 1),
        ("nemotron_h dense", 1, 2, 1),
        ("kimi_linear", 1, 1, 1),
        ("kimi_linear published", 2, 2, 2),
        ("bailing_hybrid", 2, 1, 2),
        ("bailing_hybrid unbounded", 1, 2, 1),
        ("glm5_next", 2, 2, 2),
        ("glm5_next unbounded", 1, 1, 1),
    ],
)
def test_states_of_chunks_and_mixed_batches(made, expected, name, tp, pp, ep):
    """Chunks of prompts go on from the state before, beside sequences that decode; some begin with a single token."""
    sequences = [tokens(n, seed=n) for n in (200, 33, 6, 64, 1)]
    steps = [
        [(4, 1), (0, 131), (2, 3)],
        [(2, 1), (0, 1), (3, 1), (1, 32)],
        [(2, 1), (1, 1), (0, 2), (3, 17)],
        [(2, 1), (0, 59), (3, 46)],
        [(0, 7)],
    ]
    found = run_steps(made(name), sequences, steps, tp=tp, pp=pp, ep=ep)
    for ids, logits in zip(sequences, found, strict=True):
        assert distance(logits, expected(made(name), ids)) < TOLERANCE


def test_a_head_that_predicts_further_tokens_is_left_out(made, tmp_path, caplog):
    """Qwen's stands beside the model's layers."""
    path = made("qwen3_5")
    shutil.copy(path / "config.json", tmp_path)
    weights = load_file(path / "model.safetensors")
    further = {"mtp.fc.weight": torch.zeros(3), "mtp.layers.0.mlp.gate.weight": torch.zeros(3)}
    save_file(weights | further, tmp_path / "model.safetensors")
    caplog.set_level("INFO", "phalanx")
    run_steps(tmp_path, [[1]])
    assert "multi-token prediction" in caplog.text
    assert not [one for one in caplog.records if one.levelname != "INFO"]


def test_ranks_that_do_not_divide_delta_nets_are_refused(made):
    config = read_config(made("qwen3_next"))
    with pytest.raises(FatalError, match="--tp 4.*divide.*6 key") as stop:
        build(config, GroupRank(0, 4), GroupRank(0, 1))
    assert stop.value.code == USAGE


def test_ranks_that_do_not_divide_groups_are_refused(made):
    config = read_config(made("granitemoehybrid dense"))
    with pytest.raises(FatalError, match="--tp 4 does not fit the 12 heads in 6 groups") as stop:
        build(config, GroupRank(0, 4), GroupRank(0, 1))
    assert stop.value.code == USAGE


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"layer_types": ["sliding_attention"] * 4},
            "layer type 'sliding_attention' is not supported; supported are full_attention, linear_attention",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate False is not supported"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"linear_num_value_heads": 8}, "linear_num_value_heads 8 is no multiple"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral'"),
        ({"model_type": "granitemoehybrid", "mamba_n_heads": 8, "mamba_n_groups": 3}, "8 heads of Mamba-2.*3 groups"),
        ({"model_type": "granitemoehybrid", "mamba_d_head": 7}, "mamba_d_head 7 is not supported"),
        ({"model_type": "nemotron_h", "moe_latent_size": 0}, "moe_latent_size is 0"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*x-"}, "layer type 'x' is not supported"),
        ({"model_type": "nemotron_h", "mamba_num_heads": 0}, "mamba_num_heads is 0"),
        (KIMI | {"mla_use_nope": False}, "mla_use_nope False is not supported"),
        (KIMI | {"linear_attn_config": {"num_heads": 0}}, "linear_attn_config.num_heads is 0"),
        (KIMI | {"linear_attn_config": {"kda_layers": 1, "full_attn_layers": []}}, "kda_layers.*lists"),
        (KIMI | {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2, 3]}}, "layer type 'none'"),
        (GLM_TEXT | {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail False is not supported"),
        (GLM_TEXT | {"index_kpool": 3}, "index_topk 20 is no multiple of index_kpool 3"),
        (GLM_TEXT | {"index_topk_pattern": "FFFS"}, "layer 3 shares an indexer"),
        (GLM_TEXT | {"linear_attn_config": {"gate_lower_bound": 1.0}}, "lower bound is 1.0"),
        (LING | {"kda_lower_bound": 0.5}, "kda_lower_bound is 0.5"),
        ({"model_type": "lfm2", "conv_L_cache": 0}, "conv_L_cache is 0"),
        ({"model_type": "lfm2", "layer_types": ["linear_attention"] * 4}, "supported are full_attention, conv"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, changes, message):
    config = COMMON | HYBRID | EXPERTS | {"model_type": "qwen3_next"} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FatalError, match=message) as stop:
        build(read_config(tmp_path), GroupRank(0, 1), GroupRank(0, 1))
    assert stop.value.code == MODEL
