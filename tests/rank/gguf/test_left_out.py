"""Models of GGUF files that have only the keys that llama.cpp always writes.

Arguments that a reader does not give get their defaults, which are those of config.json. They stand here with their
values, so that neither a new argument nor another default changes what files mean unseen.
"""

import dataclasses

import gguf
import numpy as np
import pytest
from phalanx.rank.gguf import architectures, checkpoint
from phalanx.rank.gguf.architectures import _common
from phalanx.rank.model import architectures as models
from phalanx.rank.model.config import read_config

from ... import gguf_files

HIDDEN, LAYERS, HEAD, VOCAB = 64, 6, 16, 99
USUAL = {
    "context_length": 8192, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": 128,
    "attention.head_count": HIDDEN // HEAD,
}  # fmt: skip
LAYER_NORMS = "cohere2", "command_r", "nemotron", "phi2", "stablelm", "starcoder", "starcoder2"
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
SHARED = EXPERTS | {"expert_shared_feed_forward_length": 32}
LATENT = {
    "rope.dimension_count": 8, "attention.key_length": 24, "attention.value_length": 16, "attention.kv_lora_rank": 32,
    "expert_shared_count": 1,
}  # fmt: skip
NETS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
}  # fmt: skip
MAMBA2 = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 128,
}  # fmt: skip
SCALES = {"embedding_scale": 12.0, "attention.scale": 0.25, "residual_scale": 0.22, "logit_scale": 8.0}
INDEXER = {"expert_gating_func": 2} | {f"attention.indexer.{key}": 16 for key in ("head_count", "key_length", "top_k")}
WINDOW = {"attention.sliding_window": 9}
# Keys that files of some architectures have besides.
KEYS = {
    "cohere2": WINDOW | {"logit_scale": 0.5}, "command_r": {"logit_scale": 0.5}, "qwen3vlmoe": EXPERTS,
    "deepseek2": EXPERTS | LATENT,
    "dots1": EXPERTS | {"expert_shared_count": 1}, "ernie4_5_moe": EXPERTS, "hunyuan_moe": EXPERTS,
    "kimi_linear": EXPERTS | LATENT | {"kda.head_dim": 16, "ssm.conv_kernel": 4, "expert_gating_func": 2},
    "lfm2": {"shortconv.l_cache": 3}, "lfm2moe": EXPERTS | {"shortconv.l_cache": 3},
    "exaone4": WINDOW, "granitemoe": SCALES | EXPERTS, "granitehybrid": SCALES | EXPERTS | MAMBA2, "olmoe": EXPERTS,
    "falcon_h1": MAMBA2, "mistral4": EXPERTS | LATENT, "nemotron_h": MAMBA2, "nemotron_h_moe": SHARED | MAMBA2,
    "gemma2": WINDOW, "gemma3": WINDOW, "gemma4": WINDOW | {
        "attention.sliding_window_pattern": [True] * 5 + [False], "attention.key_length_swa": HEAD,
    },
    "glm4moe": EXPERTS, "glm_dsa": EXPERTS | LATENT | INDEXER,
    "gpt_oss": EXPERTS | WINDOW, "granite": SCALES, "minimax_m2": EXPERTS,
    "llama4": EXPERTS | {"expert_used_count": 1, "interleave_moe_layer_step": 2}, "qwen2moe": SHARED,
    "qwen3moe": EXPERTS, "qwen3next": NETS | SHARED, "qwen35": NETS, "qwen35moe": NETS | SHARED,
}  # fmt: skip

COMMON = dict(hidden_act="silu", mlp_bias=False, attention_bias=False)
FURTHER = dict(num_local_experts=0)  # another name of a key that is given
GELU = dict(hidden_act="gelu_pytorch_tanh")
GEMMA = dict(hidden_activation="gelu_pytorch_tanh", layer_types=[])  # which counts instead of hidden_act
CAUSAL = dict(use_bidirectional_attention=False)
SLIDES = dict(use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=[])
EACH = dict(decoder_sparse_step=1, mlp_only_layers=[]) | FURTHER
RMS = dict(rms_norm_eps=1e-6)  # of models that have layer_norm_eps
NEMOTRON_H = dict(
    hidden_act="relu2", hybrid_override_pattern="", mamba_hidden_act="silu", time_step_limit=None,
)  # fmt: skip
GATED = dict(full_attention_interval=4, attn_output_gate=True)
# For each reader: the model, and its arguments that the reader leaves out, without COMMON.
LEFT_OUT = {
    "apertus": ("apertus", dict(hidden_act="xielu")),
    "arcee": ("arcee", dict(hidden_act="relu2")),
    "chatglm": ("glm", {}),
    "cohere2": ("cohere2", RMS | dict(
        layer_types=[], sliding_window_pattern=4, use_parallel_block=True, use_gated_activation=True,
    )),
    "command_r": ("cohere", RMS),
    "deepseek2": ("deepseek_v2", dict(moe_layer_freq=1)),
    "dots1": ("dots1", dict(
        use_sliding_window=True, max_window_layers=62, layer_types=[], scoring_func="sigmoid", topk_method="noaux_tc",
    )),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", dict(moe_layer_end_index=None, moe_norm_min=1e-12)),
    "exaone4": ("exaone4", dict(sliding_window_pattern=4)),
    "falcon_h1": ("falcon_h1", dict(
        mamba_expand=2, embed_scale=1.0, logit_scale=1.0, mlp_multipliers=[1.0] * 2, key_multiplier=1.0,
        attention_in_multiplier=1.0, attention_out_multiplier=1.0, ssm_multipliers=[1.0] * 5, ssm_in_multiplier=1.0,
        ssm_out_multiplier=1.0, time_step_limit=None,
    )),
    "gemma": ("gemma", GELU | CAUSAL),
    "gemma2": ("gemma2", GEMMA | CAUSAL),
    "gemma3": ("gemma3_text", GEMMA | CAUSAL | dict(
        attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window_pattern=6,
    )),
    "gemma4": ("gemma4_text", dict(
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, final_logit_softcapping=None,
        sliding_window_pattern=6, use_bidirectional_attention=None, per_layer_config={}, pad_token_id=0,
        query_pre_attn_scalar=256, num_experts=None, top_k_experts=None, moe_intermediate_size=None,
    )),
    "glm4": ("glm4", {}),
    "glm4moe": ("glm4_moe", dict(scoring_func="sigmoid", topk_method="noaux_tc")),
    "glm_dsa": ("glm_moe_dsa", dict(
        moe_layer_freq=1, rope_interleave=True, mlp_layer_types=[], index_topk_pattern=None,
        index_topk_freq=1, index_skip_topk_offset=2,
    )),
    "gpt_oss": ("gpt_oss", dict(layer_types=[], swiglu_limit=7.0, swiglu_alpha=1.702)),
    "granite": ("granite", {}),
    "granitemoe": ("granitemoe", {}),
    "granitehybrid": ("granitemoehybrid", dict(time_step_limit=None)),
    "hunyuan_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_moe": ("hunyuan_v1_moe", {}),
    "internlm2": ("llama", {}),
    "kimi_linear": ("kimi_linear", dict(
        moe_layer_freq=1, rope_interleave=True, mlp_layer_types=[], mla_use_nope=True, linear_attn_config={},
    )),
    "lfm2": ("lfm2", dict(
        conv_bias=False, full_attn_idxs=None, block_ffn_dim_multiplier=1.0, block_multiple_of=256,
    )),
    "lfm2moe": ("lfm2_moe", dict(conv_bias=False, norm_topk_prob=True, routed_scaling_factor=1.0)),
    "llama": ("llama", {}),
    "llama4": ("llama4_text", dict(
        moe_layers=None, no_rope_layers=[], no_rope_layer_interval=4, layer_types=[], use_sliding_window=False,
        sliding_window=None, attention_chunk_size=8192, attn_temperature_tuning=True, floor_scale=8192, attn_scale=0.1,
    )),
    "minimax_m2": ("minimax_m2", dict(
        rotary_dim=None, scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0, use_qk_norm=True,
        qk_norm_type="per_layer", attn_type_list=[],
    )),
    "mistral3": ("mistral", {}),
    "mistral4": ("mistral4", dict(moe_layer_freq=1, rope_interleave=True)),
    "nemotron": ("nemotron", RMS | dict(hidden_act="relu2")),
    "nemotron_h": ("nemotron_h", NEMOTRON_H | dict(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=7688, moe_latent_size=None,
        moe_shared_expert_intermediate_size=7688, routed_scaling_factor=1.0, n_group=1, topk_group=1,
        norm_topk_prob=True,
    )),
    "nemotron_h_moe": ("nemotron_h", NEMOTRON_H),
    "olmo": ("olmo", dict(clip_qkv=None)),
    "olmo2": ("olmo2", dict(clip_qkv=None)),
    "olmoe": ("olmoe", dict(clip_qkv=None, norm_topk_prob=False)),
    "phi2": ("phi", RMS | dict(hidden_act="gelu_new", qk_layernorm=False)),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", SLIDES),
    "qwen2moe": ("qwen2_moe", SLIDES | EACH | dict(norm_topk_prob=False, qkv_bias=True)),
    "qwen2vl": ("qwen2", SLIDES),
    "qwen3": ("qwen3", SLIDES),
    "qwen3vl": ("qwen3", SLIDES),
    "qwen3vlmoe": ("qwen3_moe", SLIDES | EACH),
    "qwen35": ("qwen3_5_text", GATED),
    "qwen35moe": ("qwen3_5_moe_text", GATED | EACH | dict(norm_topk_prob=True)),
    "qwen3moe": ("qwen3_moe", SLIDES | EACH),
    "qwen3next": ("qwen3_5_moe_text", GATED | EACH | dict(norm_topk_prob=True)),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=4, sliding_window=None, layer_types=[])),
    "stablelm": ("stablelm", RMS | dict(rope_pct=None)),
    "starcoder": ("gpt_bigcode", RMS | GELU | dict(
        multi_query=True, scale_attn_weights=True, add_cross_attention=False,
    )),
    "starcoder2": ("starcoder2", RMS | GELU | dict(sliding_window=None)),
}  # fmt: skip
# The values of each layer, where they are not 0 in all.
WINDOWS = {
    "cohere2": [9, 9, 9, 0, 9, 9], "exaone4": [9, 9, 9, 0, 9, 9], "gemma2": [9, 0] * 3,
    "gemma3": [9, 9, 9, 9, 9, 0], "gemma4": [9, 9, 9, 9, 9, 0], "gpt_oss": [9, 0] * 3,
}  # fmt: skip
ALL = [*range(LAYERS)]
UNROTATED = {
    "cohere2": [3], "exaone4": [3], "llama4": [3], "smollm3": [3], "starcoder": ALL, "granitehybrid": ALL,
    "nemotron_h": ALL, "nemotron_h_moe": ALL, "kimi_linear": ALL,
}  # fmt: skip


@pytest.fixture
def args_of(tmp_path):
    """The Args of a file of the architecture, and the keys that the reader gives."""

    def make(reader, **more):
        name = architectures.find(reader).NAME or reader
        epsilon = "attention.layer_norm_epsilon" if reader in LAYER_NORMS else "attention.layer_norm_rms_epsilon"
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", name)
        for key, value in (USUAL | {epsilon: 1e-3} | KEYS.get(reader, {}) | more).items():
            gguf_files._add(writer, f"{name}.{key}", value)
        writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float32))
        if reader in ("phi2", "falcon_h1"):  # whose head is never tied
            writer.add_tensor("output.weight", np.zeros((VOCAB, HIDDEN), np.float32))
        for i in range(LAYERS):
            some = (
                reader.startswith(("qwen35", "qwen3next", "granitehybrid", "nemotron_h", "kimi_linear")) and (i + 1) % 4
            )
            net = some or reader == "falcon_h1"
            writer.add_tensor(f"blk.{i}.ssm_a" if net else f"blk.{i}.attn_norm.weight", np.zeros(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        config = read_config(tmp_path / "x.gguf")
        args = models.find(config.model_type).Args.from_config(config)
        return config.model_type, args, checkpoint.config(tmp_path / "x.gguf")

    return make


@pytest.mark.parametrize("reader", architectures.supported())
def test_arguments_that_files_do_not_give(args_of, reader):
    model_type, args, given = args_of(reader)
    names = models.config_keys(model_type).names
    given |= {names[key]: value for key, value in given.items() if key in names}
    left = {one.name: getattr(args, one.name) for one in dataclasses.fields(args) if one.name not in given}
    expected, values = LEFT_OUT[reader]
    usual = {name: value for name, value in COMMON.items() if name in left}
    assert (model_type, left) == (expected, usual | values)


@pytest.mark.parametrize("reader", architectures.supported())
def test_windows_and_ropes(args_of, reader):
    """Layers without a window see all, and heads rotate whole, where files do not say otherwise."""
    _, args, _ = args_of(reader)
    layers, nets = range(LAYERS), getattr(args, "linear", lambda i: False)
    windows = [args.attention_params(i).window for i in layers if not nets(i)]
    assert windows == WINDOWS.get(reader, [0] * len(windows))
    ropes = [args.rope(i) for i in layers]
    assert [i for i in layers if ropes[i]["rope_type"] is None] == UNROTATED.get(reader, [])
    for rope in ropes:
        assert rope["rope_type"] in ("default", None) and rope.get("rope_theta", 1e4) == 1e4
        assert int(HEAD * rope.get("partial_rotary_factor", 1.0)) == HEAD


@pytest.mark.parametrize("reader", ["chatglm", "glm4", "phi2", "stablelm", "qwen35"])
def test_heads_that_are_rotated_in_part(args_of, reader):
    _, args, _ = args_of(reader, **{"rope.dimension_count": 12})
    assert int(HEAD * args.rope(0)["partial_rotary_factor"]) == 12


def test_no_number_of_routed_experts_is_made_up():
    """The model's arguments are all there: where one is 0, files say 0."""
    names = (
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group",
        "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob",
    )  # fmt: skip
    assert not any(_common.routed_keys(dict.fromkeys(names, 0)).values())
    with pytest.raises(KeyError):
        _common.routed_keys(dict.fromkeys(names[:-1], 0))
