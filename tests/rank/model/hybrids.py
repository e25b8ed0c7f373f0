"""Sizes of tiny models whose layers keep states of whole sequences: an entry for each shape, as in shapes.py."""

# Norms of an epsilon that keeps so small a net well-conditioned: heads whose outputs happen to be near zero are normed.
HYBRID = dict(
    head_dim=16, linear_num_key_heads=6, linear_num_value_heads=12, linear_key_head_dim=8, linear_value_head_dim=12,
    rms_norm_eps=0.1,
)  # fmt: skip
QWEN_VISION = dict(num_hidden_layers=2, out_hidden_size=48, num_position_embeddings=16)
EXPERTS = dict(num_experts=10, num_experts_per_tok=3, moe_intermediate_size=20, shared_expert_intermediate_size=36)
LAYERS_OF_LFM2 = ["conv", "full_attention", "conv", "conv"]
GRANITE = dict(
    model_type="granitemoehybrid", mamba_n_heads=12, mamba_d_state=16, shared_intermediate_size=36, num_local_experts=6,
    num_experts_per_tok=3, intermediate_size=20, embedding_multiplier=3.0, attention_multiplier=0.4,
    residual_multiplier=0.7, logits_scaling=0.5, rms_norm_eps=0.1,
)  # fmt: skip
NEMOTRON = dict(
    model_type="nemotron_h", head_dim=16, mamba_num_heads=12, mamba_head_dim=8, ssm_state_size=16,
    layer_norm_epsilon=0.1, time_step_min=1e-30,  # transformers keeps prompts' time steps above that, and no others
)  # fmt: skip
LATENT = dict(
    layers_block_type=["moe", "linear_attention", "moe", "full_attention"], n_groups=6, n_routed_experts=10,
    num_experts_per_tok=3, moe_intermediate_size=20, moe_shared_expert_intermediate_size=36, moe_latent_size=28,
    n_group=2, topk_group=1,
)  # fmt: skip
FALCON = dict(
    model_type="falcon_h1", head_dim=16, mamba_n_heads=12, mamba_d_ssm=96, mamba_d_head=8, mamba_d_state=16,
    rms_norm_eps=0.1, embedding_multiplier=3.0, lm_head_multiplier=2.0, mlp_multipliers=[0.8, 0.3], key_multiplier=0.4,
    attention_in_multiplier=1.2, attention_out_multiplier=0.9, ssm_multipliers=[0.7, 1.3, 0.6, 0.8, 1.1],
    ssm_in_multiplier=1.5, ssm_out_multiplier=0.6,
)  # fmt: skip
KIMI = dict(
    model_type="kimi_linear", num_key_value_heads=12, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    kv_lora_rank=24, num_experts=10, num_shared_experts=2, num_experts_per_token=3, moe_intermediate_size=20,
    rms_norm_eps=0.1,
)  # fmt: skip
# transformers writes the latent heads' rotated size as head_dim, whatever it was, and reads the other heads' there.
LING = dict(
    model_type="bailing_hybrid", num_key_value_heads=12, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    kv_lora_rank=24, head_dim=8, num_experts=16, num_shared_experts=1, moe_intermediate_size=20, rms_norm_eps=0.1,
    num_nextn_predict_layers=0,
)  # fmt: skip
# With few heads relu leaves many scores of zero, among which transformers chooses otherwise than here.
GLM = dict(
    num_key_value_heads=12, qk_nope_head_dim=16, v_head_dim=12, q_lora_rank=40, kv_lora_rank=24, n_routed_experts=10,
    num_experts_per_tok=3, moe_intermediate_size=20, swiglu_limit=0.5, rms_norm_eps=0.1, hc_sinkhorn_iters=3,
    index_n_heads=16, index_head_dim=16, index_topk=20, index_kpool=4, vocab_size=520,
)  # fmt: skip
IMAGES = dict(
    vision_config=QWEN_VISION, image_token_id=512, vision_start_token_id=513, vision_end_token_id=514,
    video_token_id=515,
)  # fmt: skip
TURNED = dict(
    vocab_size=520,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
        mrope_interleaved=True,
    ),
)  # fmt: skip
HYBRIDS = {
    "glm5_next": dict(
        model_type="glm5_next", vision_config=QWEN_VISION, text_config=GLM | dict(
            layer_types=["linear_attention", "indexed_attention"] * 2, linear_head_dim=8, linear_num_heads=6,
            mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        ),
    ),
    "glm5_next unbounded": dict(
        model_type="glm5_next", vision_config=QWEN_VISION, text_config=GLM | dict(
            layer_types=["indexed_attention", *["linear_attention"] * 2, "indexed_attention"], linear_head_dim=12,
            linear_num_heads=12, linear_conv_kernel_dim=3, linear_lower_bound=None, hc_mult=2, index_topk=6,
            index_kpool=2, norm_topk_prob=False, routed_scaling_factor=1.5,
        ),
    ),
    "kimi_linear": KIMI | dict(
        layer_types=["linear_attention", "full_attention", *["linear_attention"] * 2], linear_head_dim=12,
        linear_num_heads=6, mlp_layer_types=["dense", "sparse", "dense", "sparse"],
    ),
    "kimi_linear published": KIMI | dict(
        linear_attn_config=dict(
            kda_layers=[2, 4], full_attn_layers=[1, 3], head_dim=8, num_heads=12, short_conv_kernel_size=3,
        ),
        q_lora_rank=20, num_experts=16, num_expert_group=4, topk_group=2, moe_renormalize=False,
        first_k_dense_replace=2,
    ),
    "bailing_hybrid": LING | dict(layer_group_size=2, num_experts_per_tok=3),
    "bailing_hybrid unbounded": LING | dict(
        layer_types=["full_attention", "linear_attention"] * 2, kda_safe_gate=False, short_conv_kernel_size=3,
        n_group=2, topk_group=1, norm_topk_prob=False, num_experts_per_token=2,
        mlp_layer_types=["sparse", "dense"] * 2,
    ),
    "falcon_h1": FALCON,
    "falcon_h1 normed": FALCON | dict(
        mamba_rms_norm=True, mamba_n_groups=6, num_key_value_heads=1, mamba_conv_bias=False, tie_word_embeddings=True,
    ),
    "falcon_h1 gated first": FALCON | dict(mamba_rms_norm=True, mamba_norm_before_gate=False, mlp_bias=True),
    "nemotron_h": NEMOTRON | dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"], n_groups=6, n_routed_experts=10,
        num_experts_per_tok=3, moe_intermediate_size=20, moe_shared_expert_intermediate_size=36,
        routed_scaling_factor=2.5,
    ),
    "nemotron_h latent": NEMOTRON | LATENT,
    "nemotron_h latent biased": NEMOTRON | LATENT | dict(mlp_bias=True),
    "nemotron_h dense": NEMOTRON | dict(
        hybrid_override_pattern="M-*M", n_groups=1, use_bias=True, mlp_bias=True, use_conv_bias=False, conv_kernel=3,
    ),
    "granitemoehybrid": GRANITE | dict(layer_types=["linear_attention", "full_attention", *["linear_attention"] * 2]),
    "granitemoehybrid dense": GRANITE | dict(
        layer_types=["full_attention", "linear_attention"] * 2, num_local_experts=0, mamba_n_groups=6,
        mamba_d_conv=3, mamba_conv_bias=False, mamba_proj_bias=True, position_embedding_type="rope",
        tie_word_embeddings=True, attention_bias=True,
    ),
    "lfm2": dict(model_type="lfm2", layer_types=LAYERS_OF_LFM2, tie_word_embeddings=True, block_multiple_of=8),
    "lfm2 biased": dict(
        model_type="lfm2", full_attn_idxs=[3, 1], conv_bias=True, conv_L_cache=4, tie_word_embeddings=False,
        block_auto_adjust_ff_dim=False, num_key_value_heads=1,
    ),
    "lfm2_moe": dict(
        model_type="lfm2_moe", layer_types=LAYERS_OF_LFM2, num_experts=10, num_experts_per_tok=3,
        moe_intermediate_size=20, num_dense_layers=1,
    ),
    "lfm2_moe unbiased": dict(
        model_type="lfm2_moe", layer_types=LAYERS_OF_LFM2[::-1], num_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=20, use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.5,
        conv_bias=True, tie_word_embeddings=False,
    ),
    "qwen3_next": HYBRID | EXPERTS | dict(model_type="qwen3_next"),
    "qwen3_next mixed": HYBRID | EXPERTS | dict(
        model_type="qwen3_next", layer_types=["full_attention", "linear_attention"] * 2, linear_num_value_heads=6,
        linear_conv_kernel_dim=3, mlp_only_layers=[1], norm_topk_prob=False, attention_bias=True,
        partial_rotary_factor=0.5, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "qwen3_5_text": HYBRID | dict(model_type="qwen3_5_text", attention_bias=True),
    "qwen3_5": IMAGES | dict(
        model_type="qwen3_5", tie_word_embeddings=True,
        text_config=HYBRID | TURNED | dict(
            linear_num_value_heads=6, layer_types=["full_attention", "linear_attention"] * 2,
        ),
    ),
    "qwen3_5_moe_text": HYBRID | EXPERTS | dict(model_type="qwen3_5_moe_text"),
    "qwen3_5_moe": IMAGES | dict(model_type="qwen3_5_moe", text_config=HYBRID | EXPERTS | TURNED),
}  # fmt: skip
