"""Models that benchmarks load with random weights: config.json of their shapes, and of quantised checkpoints."""

from __future__ import annotations

import json
from typing import Any

from phalanx.launcher import builtin_model

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
LLAMAS: dict[str, dict[str, Any]] = {
    "llama-99m": LLAMA | dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                              num_key_value_heads=4, vocab_size=32000, max_position_embeddings=4096),
    "llama3-8b": LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                              num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192),
    "llama3-70b": LLAMA | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                               num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192),
}  # fmt: skip
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
QWEN3_MOE = QWEN3 | dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=128,
                         num_experts_per_tok=8, norm_topk_prob=True, head_dim=128, vocab_size=151936,
                         max_position_embeddings=40960)  # fmt: skip
# With a head for multi-token prediction, and without the vision tower.
QWEN3_5: dict[str, Any] = dict(
    model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], vocab_size=248320, head_dim=256,
    rms_norm_eps=1e-6, partial_rotary_factor=0.25, rope_theta=10000000.0, max_position_embeddings=262144,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    mtp_num_hidden_layers=1,
)  # fmt: skip
# Only gpt-oss's experts are quantised.
GPT_OSS_PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
CONFIGS: dict[str, dict[str, Any]] = LLAMAS | {
    "tiny": LLAMA | dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
                         num_key_value_heads=4, head_dim=64, vocab_size=32000, max_position_embeddings=8192),
    "qwen3-8b": QWEN3 | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                             num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960),
    "qwen3-30b-a3b": QWEN3_MOE | dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                                      num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4),
    "qwen3-235b-a22b": QWEN3_MOE | dict(hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
                                        num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4),
    "qwen3.5-27b": QWEN3_5 | dict(hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
                                  num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48),
    "qwen3.5-35b-a3b": QWEN3_5 | dict(model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"],
                                      hidden_size=2048, num_hidden_layers=40, num_attention_heads=16,
                                      num_key_value_heads=2, linear_num_value_heads=32, num_experts=256,
                                      num_experts_per_tok=8, moe_intermediate_size=512,
                                      shared_expert_intermediate_size=512),
    "deepseek-v2-lite": dict(model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], hidden_size=2048,
                             intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64,
                             n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, num_hidden_layers=27,
                             num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None,
                             qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, vocab_size=102400,
                             max_position_embeddings=163840, rope_theta=10000.0, rms_norm_eps=1e-6,
                             rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=4096,
                                               mscale=0.707, mscale_all_dim=0.707, beta_fast=32, beta_slow=1)),
    "mixtral-8x7b": dict(model_type="mixtral", architectures=["MixtralForCausalLM"], hidden_size=4096,
                         intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, rope_theta=1000000.0,
                         max_position_embeddings=32768, rms_norm_eps=1e-5),
    "qwen2.5-7b": dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=3584,
                       intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
                       vocab_size=152064, max_position_embeddings=32768, rope_theta=1000000.0, rms_norm_eps=1e-6),
    "qwen2.5-vl-7b": dict(model_type="qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"],
                          hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                          num_key_value_heads=4, vocab_size=152064, max_position_embeddings=128000,
                          rope_theta=1000000.0, rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
                          rms_norm_eps=1e-6, bos_token_id=151643, eos_token_id=151645, vision_start_token_id=151652,
                          vision_end_token_id=151653, vision_token_id=151654, image_token_id=151655,
                          video_token_id=151656, tie_word_embeddings=False,
                          vision_config=dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16,
                                             out_hidden_size=3584, patch_size=14, spatial_merge_size=2,
                                             temporal_patch_size=2, window_size=112, tokens_per_second=2,
                                             fullatt_block_indexes=[7, 15, 23, 31])),
    "gpt-oss-20b": dict(model_type="gpt_oss", architectures=["GptOssForCausalLM"], hidden_size=2880,
                        intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4, num_hidden_layers=24,
                        num_attention_heads=64, num_key_value_heads=8, head_dim=64, vocab_size=201088,
                        max_position_embeddings=131072, sliding_window=128, rope_theta=150000.0, rms_norm_eps=1e-5,
                        quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=GPT_OSS_PLAIN)),
    "gemma2-9b": dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"], hidden_size=3584,
                      intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16, num_key_value_heads=8,
                      head_dim=256, vocab_size=256000, max_position_embeddings=8192, rope_theta=10000.0,
                      rms_norm_eps=1e-6, sliding_window=4096, query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
                      final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True),
    # Gemma 4 E4B without its towers; each sixth layer has full attention, by the type's default.
    "gemma4-e4b": dict(model_type="gemma4_text", architectures=["Gemma4ForCausalLM"], hidden_size=2560,
                       intermediate_size=10240, num_hidden_layers=42, num_attention_heads=8, num_key_value_heads=2,
                       head_dim=256, global_head_dim=512, num_kv_shared_layers=18, sliding_window=512,
                       hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, vocab_size=262144,
                       max_position_embeddings=131072, rms_norm_eps=1e-6, final_logit_softcapping=30.0,
                       hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True),
    "glm-4.7-flash": dict(model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"], hidden_size=2048,
                          intermediate_size=10240, moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1,
                          num_experts_per_tok=4, first_k_dense_replace=1, norm_topk_prob=True,
                          routed_scaling_factor=1.8, topk_method="noaux_tc", n_group=1, topk_group=1,
                          num_hidden_layers=47, num_attention_heads=20, num_key_value_heads=20, q_lora_rank=768,
                          kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
                          vocab_size=154880, max_position_embeddings=202752, rope_theta=1000000.0, rms_norm_eps=1e-5),
    "nemotron-3-nano": dict(model_type="nemotron_h", architectures=["NemotronHForCausalLM"], hidden_size=2688,
                            intermediate_size=1856, moe_intermediate_size=1856, n_routed_experts=128,
                            n_shared_experts=1, moe_shared_expert_intermediate_size=3712, num_experts_per_tok=6,
                            norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1,
                            num_hidden_layers=52, num_attention_heads=32, num_key_value_heads=2, head_dim=128,
                            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                            mamba_num_heads=64, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4,
                            vocab_size=131072, max_position_embeddings=262144, layer_norm_epsilon=1e-5),
    "built-in": json.loads((builtin_model.DIRECTORY / "config.json").read_text()),
}  # fmt: skip


def compressed(form: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' settings of all linears but the head."""
    group = dict(targets=["Linear"], weights=dict(symmetric=True, **weights), input_activations=activations)
    groups = {"all": group}
    return dict(quant_method="compressed-tensors", format=form, ignore=["lm_head"], config_groups=groups)


# Checkpoints of these settings, with random codes
QUANTIZED: dict[str, dict[str, Any]] = {
    "gptq": dict(quant_method="gptq", bits=4, group_size=128, sym=True, desc_act=False),
    "marlin": dict(quant_method="gptq", checkpoint_format="marlin", bits=4, group_size=128, sym=True, desc_act=False),
    "awq": dict(quant_method="awq", bits=4, group_size=128, version="gemm", zero_point=True),
    "fp8": dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic"),
    "gptq-8": dict(quant_method="gptq", bits=8, group_size=128, sym=True, desc_act=False),
    "w4a16": compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
    "w8a16": compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "w8a8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "w8a8-fp8": compressed("float-quantized", dict(num_bits=8, type="float", dynamic=True, strategy="token"),
                           num_bits=8, type="float", strategy="channel"),
}  # fmt: skip
