"""Sizes of tiny models: an entry for each shape of each architecture. hybrids.py has those with gated delta nets."""

from .hybrids import HYBRIDS

COMMON = dict(
    hidden_size=48, intermediate_size=100, num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=6,
    vocab_size=512, max_position_embeddings=512, bos_token_id=0, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
TEMPERATURE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
IMAGE = 512  # the token that stands for images, which texts of tests do not have
MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.7], "long_factor": [2.0, 8.0]}
DEEPSEEK = dict(
    num_key_value_heads=12, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, kv_lora_rank=24,
    n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=3, moe_intermediate_size=20,
)  # fmt: skip
# With few heads relu leaves many scores of zero, among which transformers chooses otherwise than here.
INDEXER = dict(index_n_heads=16, index_head_dim=16, index_topk=20)
DEEPSEEK_V4 = INDEXER | dict(
    model_type="deepseek_v4", num_key_value_heads=1, head_dim=16, qk_rope_head_dim=8, q_lora_rank=40, o_groups=6,
    o_lora_rank=8, n_routed_experts=16, num_experts_per_tok=3, moe_intermediate_size=20, intermediate_size=20,
    swiglu_limit=0.5, sliding_window=11, index_topk=5, hc_sinkhorn_iters=3,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
)  # fmt: skip
STEP = dict(
    head_dim=16, n_routed_experts=10, num_experts_per_tok=3, moe_intermediate_size=20, share_expert_dim=36,
    sliding_window=11, vocab_size=520, pad_token_id=519,
)  # fmt: skip
DEEPSEEK_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
# Entries of MODELS whose layers cannot be divided into pipeline stages.
ONE_STAGE = ("gemma4_text small", "gemma4 small")
# Arguments that each is tested with besides; several sets where an architecture has several shapes.
MODELS = {
    "qwen2_5_vl": dict(
        model_type="qwen2_5_vl", image_token_id=IMAGE, vision_start_token_id=513, vision_end_token_id=514,
        video_token_id=515,
        text_config=dict(hidden_size=96, vocab_size=520, rope_parameters=MROPE, tie_word_embeddings=False),
        vision_config=dict(
            num_hidden_layers=3, intermediate_size=40, out_hidden_size=96, window_size=56, fullatt_block_indexes=[1],
        ),
    ),
    "qwen2_vl": dict(
        model_type="qwen2_vl", image_token_id=IMAGE, vision_start_token_id=513, vision_end_token_id=514,
        video_token_id=515,
        text_config=dict(hidden_size=96, vocab_size=520, rope_parameters=MROPE, tie_word_embeddings=False),
        vision_config=dict(num_hidden_layers=2, embed_dim=32, hidden_size=96),
    ),
    "qwen3_vl": dict(
        model_type="qwen3_vl", image_token_id=IMAGE, vision_start_token_id=513, vision_end_token_id=514,
        video_token_id=515, tie_word_embeddings=False,
        text_config=dict(head_dim=8, vocab_size=520, rope_parameters=MROPE | {"mrope_interleaved": True}),
        vision_config=dict(
            num_hidden_layers=3, out_hidden_size=48, num_position_embeddings=16, deepstack_visual_indexes=[0, 1],
        ),
    ),
    "qwen3_vl_moe": dict(
        model_type="qwen3_vl_moe", image_token_id=IMAGE, vision_start_token_id=513, vision_end_token_id=514,
        video_token_id=515, tie_word_embeddings=False,
        text_config=dict(
            head_dim=8, vocab_size=520, rope_parameters=MROPE | {"mrope_interleaved": True}, num_experts=6,
            num_experts_per_tok=2, moe_intermediate_size=20, tie_word_embeddings=False, decoder_sparse_step=2,
        ),
        vision_config=dict(
            num_hidden_layers=3, out_hidden_size=48, num_position_embeddings=16, deepstack_visual_indexes=[0, 1],
        ),
    ),
    "hy_v3": dict(
        model_type="hy_v3", head_dim=16, num_experts=10, num_experts_per_tok=3, num_shared_experts=2,
        moe_intermediate_size=20, attention_bias=True,
    ),
    "hy_v3 mixed": dict(
        model_type="hy_v3", head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20,
        mlp_layer_types=["sparse", "dense"] * 2, num_key_value_heads=1, router_scaling_factor=0.7,
        tie_word_embeddings=True,
    ),
    "qwen2": dict(model_type="qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=2),
    "mistral": dict(model_type="mistral", head_dim=16, sliding_window=13),
    "mistral no window": dict(model_type="mistral", sliding_window=None),
    "ministral": dict(
        model_type="ministral", head_dim=16, sliding_window=13, layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "ministral3": dict(model_type="ministral3", head_dim=16, rope_parameters=TEMPERATURE),
    "mistral3": dict(
        model_type="mistral3", vision_config=dict(model_type="pixtral", num_hidden_layers=2), image_token_index=IMAGE,
        image_break_token_id=513, image_end_token_id=514, spatial_merge_size=2, tie_word_embeddings=False,
        text_config=dict(model_type="mistral", head_dim=16, sliding_window=13, vocab_size=520),
    ),
    "mistral3 of ministral3": dict(
        model_type="mistral3", vision_config=dict(model_type="pixtral"), image_token_index=500,
        text_config=dict(
            model_type="ministral3", head_dim=16, rope_parameters=TEMPERATURE, tie_word_embeddings=True,
        ),
    ),
    "mistral3 of mistral4": dict(
        model_type="mistral3", vision_config=dict(model_type="pixtral", num_hidden_layers=2), image_token_index=IMAGE,
        image_break_token_id=513, image_end_token_id=514, spatial_merge_size=2, tie_word_embeddings=False,
        text_config=DEEPSEEK | dict(
            model_type="mistral4", vocab_size=520, q_lora_rank=40, first_k_dense_replace=1, n_shared_experts=1,
            rope_parameters=TEMPERATURE, tie_word_embeddings=False,
        ),
    ),
    "llava": dict(
        model_type="llava", vision_config=dict(model_type="clip_vision_model", num_hidden_layers=3, image_size=42),
        image_token_index=IMAGE, text_config=dict(model_type="llama", vocab_size=520), tie_word_embeddings=False,
    ),
    "llava of siglip": dict(
        model_type="llava", image_token_index=IMAGE, tie_word_embeddings=False, vision_feature_layer=-1,
        vision_feature_select_strategy="full", text_config=dict(model_type="qwen2", vocab_size=520),
        vision_config=dict(
            model_type="siglip_vision_model", num_hidden_layers=2, image_size=42, vision_use_head=False,
        ),
    ),
    "pixtral": dict(
        model_type="llava", vision_config=dict(model_type="pixtral", num_hidden_layers=2), image_token_index=IMAGE,
        image_break_token_id=513, image_end_token_id=514, tie_word_embeddings=False, vision_feature_layer=-1,
        vision_feature_select_strategy="full", text_config=dict(model_type="mistral", head_dim=16, vocab_size=520),
    ),
    "llava_next": dict(
        model_type="llava_next", image_token_index=IMAGE, tie_word_embeddings=False,
        vision_config=dict(model_type="clip_vision_model", num_hidden_layers=3, image_size=42),
        image_grid_pinpoints=[[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]],
        text_config=dict(model_type="mistral", head_dim=16, vocab_size=520),
    ),
    "idefics3": dict(
        model_type="idefics3", image_token_id=IMAGE, tie_word_embeddings=False, scale_factor=2,
        vision_config=dict(num_hidden_layers=2, image_size=28, patch_size=7),
        text_config=dict(model_type="llama", vocab_size=520, tie_word_embeddings=False),
    ),
    "smolvlm": dict(
        model_type="smolvlm", image_token_id=IMAGE, tie_word_embeddings=True, scale_factor=2,
        vision_config=dict(num_hidden_layers=2, image_size=28, patch_size=7),
        text_config=dict(model_type="llama", vocab_size=520, tie_word_embeddings=True),
    ),
    "gemma": dict(model_type="gemma", head_dim=16),
    "gemma2": dict(
        model_type="gemma2", head_dim=16, query_pre_attn_scalar=24, sliding_window=11, attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": dict(
        model_type="gemma3_text", num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=24, sliding_window=11,
        rope_parameters=TWO_ROPES,
    ),
    "gemma3": dict(
        model_type="gemma3", image_token_index=IMAGE, boi_token_index=513, eoi_token_index=514, mm_tokens_per_image=9,
        vision_config=dict(
            model_type="siglip_vision_model", num_hidden_layers=2, image_size=98, vision_use_head=False,
        ),
        text_config=dict(
            model_type="gemma3_text", head_dim=16, sliding_window=11, rope_parameters=TWO_ROPES, vocab_size=520,
            layer_types=["full_attention", "sliding_attention"] * 2, query_pre_attn_scalar=24,
        ),
    ),
    "gemma3_text capped": dict(
        model_type="gemma3_text", head_dim=16, layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=11, final_logit_softcapping=3.0, attention_bias=True,
    ),
    "apertus": dict(model_type="apertus", attention_bias=True),
    "apertus1p5_text": dict(  # transformers before 5.24 does not know it
        model_type="apertus1p5_text", vocab_size=520, output_vocab_size=512, tie_word_embeddings=False,
    ),
    "cohere2": dict(model_type="cohere2", sliding_window=11, logit_scale=0.7),
    "cohere2 biased": dict(
        model_type="cohere2", sliding_window=11, logit_scale=0.7, attention_bias=True,
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters=dict(rope_type="default", rope_theta=1e3),
    ),
    "glm": dict(model_type="glm", head_dim=16),
    "glm rotated whole": dict(model_type="glm", head_dim=16, attention_bias=False, partial_rotary_factor=1.0),
    "glm4": dict(model_type="glm4", head_dim=16, num_key_value_heads=1),
    "olmo2": dict(model_type="olmo2"),
    "olmo2 few keys": dict(model_type="olmo2", num_key_value_heads=1, attention_bias=True, rms_norm_eps=0.1),
    "olmo3": dict(
        model_type="olmo3", sliding_window=11,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granite": dict(
        model_type="granite", embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.7,
        logits_scaling=0.5, tie_word_embeddings=True,
    ),
    "granite biased": dict(model_type="granite", attention_bias=True, mlp_bias=True, residual_multiplier=0.7),
    "ernie4_5": dict(model_type="ernie4_5", head_dim=16),
    "ernie4_5 biased": dict(model_type="ernie4_5", head_dim=16, use_bias=True, tie_word_embeddings=False),
    "arcee": dict(model_type="arcee", tie_word_embeddings=True),
    "arcee biased": dict(model_type="arcee", attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    "seed_oss": dict(model_type="seed_oss", head_dim=16),
    "seed_oss other biases": dict(
        model_type="seed_oss", head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True,
        num_key_value_heads=1, tie_word_embeddings=True,
    ),
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
    "qwen2_moe without biases": dict(
        model_type="qwen2_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20,
        shared_expert_intermediate_size=36, qkv_bias=False,
    ),
    "qwen3_moe": dict(
        model_type="qwen3_moe", head_dim=8, num_experts=10, num_experts_per_tok=4, moe_intermediate_size=28,
        norm_topk_prob=True, decoder_sparse_step=2,
    ),
    "qwen3_moe unnormalised": dict(
        model_type="qwen3_moe", head_dim=8, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=28,
    ),
    "glm4_moe": dict(
        model_type="glm4_moe", n_routed_experts=16, n_shared_experts=2, num_experts_per_tok=3,
        moe_intermediate_size=20, n_group=4, topk_group=2, routed_scaling_factor=1.8, first_k_dense_replace=2,
        head_dim=8, partial_rotary_factor=0.5, use_qk_norm=True, attention_bias=True,
    ),
    "glm4_moe plain": dict(
        model_type="glm4_moe", n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=20,
        norm_topk_prob=False, first_k_dense_replace=0, head_dim=8,
    ),
    "deepseek_v2": DEEPSEEK | dict(
        model_type="deepseek_v2", q_lora_rank=None, first_k_dense_replace=1, n_shared_experts=2,
        rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek_v2 in groups": DEEPSEEK | dict(
        model_type="deepseek_v2", q_lora_rank=40, topk_method="group_limited_greedy", n_group=4,
        topk_group=2, routed_scaling_factor=2.5, attention_bias=True, tie_word_embeddings=True,
    ),
    "deepseek_v3": DEEPSEEK | dict(
        model_type="deepseek_v3", q_lora_rank=40, first_k_dense_replace=2, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek_v3 plain": DEEPSEEK | dict(
        model_type="deepseek_v3", q_lora_rank=None, first_k_dense_replace=0, n_shared_experts=2, n_group=1,
        topk_group=1, norm_topk_prob=False, rope_interleave=False,
    ),
    "gemma4_text": dict(
        model_type="gemma4_text", num_hidden_layers=7, head_dim=16, global_head_dim=32, sliding_window=11,
        hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
        num_experts=6, top_k_experts=2, moe_intermediate_size=20,
    ),
    "gemma4_text small": dict(
        model_type="gemma4_text", num_hidden_layers=7, head_dim=16, global_head_dim=32, sliding_window=11,
        vocab_size_per_layer_input=512, hidden_size_per_layer_input=8, num_kv_shared_layers=3, use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 3 + ["full_attention"], final_logit_softcapping=3.0,
    ),
    "gemma4": dict(
        model_type="gemma4", image_token_id=IMAGE, boi_token_id=513, eoi_token_id=514,
        vision_config=dict(
            num_hidden_layers=2, head_dim=16, num_attention_heads=2, num_key_value_heads=2, patch_size=7,
            position_embedding_size=1024, standardize=True,
        ),
        audio_config=None, text_config=dict(
            model_type="gemma4_text", head_dim=16, global_head_dim=32, sliding_window=11, hidden_size_per_layer_input=0,
            pad_token_id=0, vocab_size=520, use_bidirectional_attention="vision",
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    "gemma4 small": dict(
        model_type="gemma4", image_token_id=IMAGE, boi_token_id=513, eoi_token_id=514,
        vision_config=dict(
            num_hidden_layers=2, head_dim=16, num_attention_heads=2, num_key_value_heads=1, patch_size=7,
            position_embedding_size=1024, use_clipped_linears=True,
        ),
        audio_config=None, text_config=dict(
            model_type="gemma4_text", num_hidden_layers=3, head_dim=16, global_head_dim=32, sliding_window=11,
            vocab_size_per_layer_input=520, hidden_size_per_layer_input=8, num_kv_shared_layers=1, pad_token_id=0,
            use_double_wide_mlp=True, vocab_size=520, final_logit_softcapping=3.0,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
    ),
    "glm4_moe_lite": DEEPSEEK | dict(
        model_type="glm4_moe_lite", q_lora_rank=40, n_shared_experts=2, n_group=4, topk_group=2,
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
    ),
    "glm4_moe_lite plain": DEEPSEEK | dict(model_type="glm4_moe_lite", q_lora_rank=None, rope_interleave=False),
    "deepseek_v32": DEEPSEEK | INDEXER | dict(
        model_type="deepseek_v32", q_lora_rank=40, first_k_dense_replace=2, n_group=4, topk_group=2,
        rope_parameters=DEEPSEEK_YARN,
    ),
    "deepseek_v4": DEEPSEEK_V4 | dict(
        layer_types=["sliding_attention", *["heavily_compressed_attention", "compressed_sparse_attention"] * 2][:4],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"], rope_parameters=dict(
            rope_type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
        ),
    ),
    "glm_moe_dsa": DEEPSEEK | INDEXER | dict(
        model_type="glm_moe_dsa", q_lora_rank=40, first_k_dense_replace=1,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "glm_moe_dsa own": DEEPSEEK | INDEXER | dict(
        model_type="glm_moe_dsa", q_lora_rank=40, attention_bias=True, index_topk=7,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    ),
    "kimi_k25": dict(
        model_type="kimi_k25", vision_config=dict(hidden_size=32, num_hidden_layers=1), image_token_id=500,
        tie_word_embeddings=False,
        text_config=DEEPSEEK | dict(model_type="deepseek_v3", q_lora_rank=40, n_group=1, topk_group=1),
    ),
    "hunyuan_v1_dense": dict(
        model_type="hunyuan_v1_dense", head_dim=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    ),
    "hunyuan_v1_dense biased": dict(
        model_type="hunyuan_v1_dense", head_dim=8, attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "hunyuan_v1_moe": dict(
        model_type="hunyuan_v1_moe", head_dim=16, num_experts=6, moe_topk=[3, 1, 2, 3], intermediate_size=20,
    ),
    "ernie4_5_moe": dict(
        model_type="ernie4_5_moe", moe_num_experts=10, moe_k=3, moe_intermediate_size=20, tie_word_embeddings=False,
    ),
    "ernie4_5_moe in some": dict(
        model_type="ernie4_5_moe", moe_num_experts=6, moe_k=2, moe_intermediate_size=20, moe_num_shared_experts=0,
        moe_layer_interval=2, moe_layer_start_index=0, moe_layer_end_index=2,
    ),
    "mistral4": DEEPSEEK | dict(
        model_type="mistral4", q_lora_rank=40, first_k_dense_replace=1, n_group=4, topk_group=2,
        routed_scaling_factor=1.5, rope_parameters=DEEPSEEK_YARN | dict(
            llama_4_scaling_beta=0.2, original_max_position_embeddings=16,
        ),
    ),
    "mistral4 plain": DEEPSEEK | dict(
        model_type="mistral4", q_lora_rank=None, norm_topk_prob=False, rope_interleave=False,
        rope_parameters=TEMPERATURE, tie_word_embeddings=True,
    ),
    "minicpm3": dict(
        model_type="minicpm3", num_key_value_heads=12, q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=12, scale_emb=3.0, dim_model_base=96, rope_parameters=LONGROPE | dict(
            short_factor=[1.0, 1.2, 1.5, 1.7], long_factor=[2.0, 3.0, 6.0, 8.0], original_max_position_embeddings=512,
        ),
    ),
    "minicpm3 unscaled": dict(
        model_type="minicpm3", num_key_value_heads=12, q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=16,
        qk_rope_head_dim=8, scale_emb=1.0, scale_depth=None, dim_model_base=None, tie_word_embeddings=False,
    ),
    "gpt_neox": dict(model_type="gpt_neox", num_attention_heads=6, num_key_value_heads=None),
    "gpt_neox in turn": dict(
        model_type="gpt_neox", num_attention_heads=6, num_key_value_heads=None, use_parallel_residual=False,
        attention_bias=False, hidden_act="gelu_new", tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
    ),
    "dots1": dict(
        model_type="dots1", num_key_value_heads=6, head_dim=16, n_routed_experts=8, n_shared_experts=2,
        num_experts_per_tok=3, moe_intermediate_size=20, first_k_dense_replace=1, norm_topk_prob=True, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, sliding_window=11, max_window_layers=2,
    ),
    "olmoe": dict(model_type="olmoe", num_experts=6, num_experts_per_tok=3, intermediate_size=20),
    "olmoe normalised": dict(
        model_type="olmoe", num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True,
        tie_word_embeddings=True,
    ),
    "exaone4": dict(model_type="exaone4", head_dim=16, sliding_window=11, sliding_window_pattern=3),
    "exaone4 of full attention": dict(
        model_type="exaone4", sliding_window=None, layer_types=["full_attention"] * 4, tie_word_embeddings=True,
    ),
    "internlm3": dict(model_type="internlm3", head_dim=16, attention_bias=True, mlp_bias=True),
    "nemotron": dict(model_type="nemotron", head_dim=16, attention_bias=True, mlp_bias=True),
    "nemotron without biases": dict(
        model_type="nemotron", hidden_act="silu", head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    ),
    "granitemoe": dict(
        model_type="granitemoe", num_local_experts=6, num_experts_per_tok=3, intermediate_size=20,
        embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.7, logits_scaling=0.5,
    ),
    "step3p7": dict(
        model_type="step3p7", vision_config=dict(intermediate_size=32, patch_size=14), image_token_id=500,
        text_config=STEP | dict(
            layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
            num_sliding_attention_heads=18, mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            swiglu_limits=[0.0, 0.0, 0.5, 0.25], swiglu_limits_shared=[0.5, 0.0, 0.25, 0.0],
            moe_router_scaling_factor=2.5,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        ),
    ),
    "step3p7 few keys": dict(
        model_type="step3p7", vision_config=dict(intermediate_size=32, patch_size=14), image_token_id=500,
        text_config=STEP | dict(
            layer_types=["sliding_attention", "full_attention"] * 2, num_key_value_heads=1, n_routed_experts=5,
            moe_layers_enum="1,3", rope_theta=[1e4, 1e5] * 2, partial_rotary_factors=[1.0, 0.5] * 2,
            attention_other_setting={"num_attention_heads": 6}, query_pre_attn_scalar=24,
        ),
    ),
    "minimax_m2": dict(  # transformers before 5.18 does not read rotary_dim
        model_type="minimax_m2", num_local_experts=10, num_experts_per_tok=3, head_dim=8, rotary_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "minimax_m2 few keys": dict(
        model_type="minimax_m2", num_local_experts=5, num_experts_per_tok=5, head_dim=8, num_key_value_heads=1,
    ),
    "minimax_m3_vl_text": dict(
        model_type="minimax_m3_vl_text", head_dim=16, num_local_experts=10, num_experts_per_tok=3, intermediate_size=40,
        dense_intermediate_size=72, shared_intermediate_size=36, index_n_heads=6, index_head_dim=16, index_block_size=4,
        index_topk_blocks=4, layer_types=["full_attention", *["minimax_m3_sparse"] * 3],
        mlp_layer_types=["dense", *["sparse"] * 3],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "minimax_m3_vl_text few keys": dict(
        model_type="minimax_m3_vl_text", head_dim=8, num_key_value_heads=1, num_local_experts=5, num_experts_per_tok=2,
        dense_intermediate_size=72, shared_intermediate_size=36, index_n_heads=1, index_head_dim=16, index_block_size=3,
        index_topk_blocks=3, index_local_blocks=2, layer_types=["minimax_m3_sparse"] * 4, swiglu_limit=0.5,
    ),
    "minimax_m3_vl": dict(
        model_type="minimax_m3_vl", image_token_index=510, video_token_index=511, projector_hidden_size=48,
        tie_word_embeddings=False,
        text_config=dict(
            model_type="minimax_m3_vl_text", head_dim=8, num_local_experts=5, num_experts_per_tok=2,
            dense_intermediate_size=72, shared_intermediate_size=36, moe_layer_freq=[0, 1, 1, 1],
            sparse_attention_config=dict(
                sparse_num_index_heads=6, sparse_index_dim=16, sparse_block_size=8, sparse_topk_blocks=2,
                sparse_local_block=1, sparse_attention_freq=[0, 0, 1, 1],
            ),
        ),
        vision_config=dict(hidden_size=32),
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=6, num_experts_per_tok=2, sliding_window=11),
    "gpt_oss": dict(
        model_type="gpt_oss", num_local_experts=6, num_experts_per_tok=2, head_dim=8, sliding_window=11,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    ),
    "gpt_oss few keys": dict(
        model_type="gpt_oss", num_local_experts=5, num_experts_per_tok=1, head_dim=16, num_key_value_heads=1,
        sliding_window=7, layer_types=["full_attention", "sliding_attention"] * 2, attention_bias=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e3), intermediate_size=96,
    ),
    "phi": dict(model_type="phi", num_attention_heads=6, num_key_value_heads=1),
    "phi wide rotation": dict(
        model_type="phi", num_attention_heads=6, partial_rotary_factor=0.75, num_key_value_heads=None,
        hidden_act="gelu",
    ),
    "smollm3": dict(model_type="smollm3", tie_word_embeddings=True),
    "smollm3 sliding": dict(
        model_type="smollm3", use_sliding_window=True, sliding_window=11, no_rope_layers=[0, 1, 1, 0],
        attention_bias=True, mlp_bias=True, rope_parameters=dict(rope_type="default", rope_theta=1e3),
    ),
    "llama4_text": dict(
        model_type="llama4_text", head_dim=16, attention_chunk_size=16, floor_scale=8, attn_scale=0.5,
        interleave_moe_layer_step=2, num_local_experts=6, intermediate_size=20, intermediate_size_mlp=100,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=5e5, factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama4_text of experts": dict(
        model_type="llama4_text", head_dim=16, attention_chunk_size=32, no_rope_layers=[0, 1, 1, 0],
        num_local_experts=5, intermediate_size=20, use_qk_norm=False, attn_temperature_tuning=False,
        attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "llama4": dict(
        model_type="llama4", tie_word_embeddings=False, image_token_index=500,
        text_config=dict(
            model_type="llama4_text", head_dim=16, attention_chunk_size=16, floor_scale=8, moe_layers=[1, 3],
            num_local_experts=6, intermediate_size=20, intermediate_size_mlp=100,
        ),
        vision_config=dict(
            model_type="llama4_vision_model", vision_output_dim=64, projector_input_dim=32, projector_output_dim=32,
        ),
    ),
    "cohere": dict(model_type="cohere", logit_scale=0.7),
    "cohere normed": dict(
        model_type="cohere", logit_scale=0.7, use_qk_norm=True, attention_bias=True, tie_word_embeddings=False,
        num_key_value_heads=1, rope_parameters=dict(rope_type="default", rope_theta=1e3),
    ),
    "falcon": dict(model_type="falcon", num_attention_heads=6, num_kv_heads=6, ffn_hidden_size=100),
    "falcon of groups": dict(
        model_type="falcon", num_kv_heads=6, new_decoder_architecture=True, bias=True, tie_word_embeddings=False,
    ),
    "falcon of groups with a norm": dict(
        model_type="falcon", num_kv_heads=6, new_decoder_architecture=True, num_ln_in_parallel_attn=1,
        activation="gelu_new",
    ),
    "falcon in turn": dict(
        model_type="falcon", num_attention_heads=6, num_kv_heads=6, multi_query=False, parallel_attn=False, bias=True,
        ffn_hidden_size=100,
    ),
    "gptj": dict(model_type="gptj", num_attention_heads=6, num_key_value_heads=None, rotary_dim=4, n_inner=100),
    "gptj rotated whole": dict(
        model_type="gptj", num_attention_heads=6, num_key_value_heads=None, rotary_dim=8, activation_function="gelu",
    ),
    "olmo": dict(model_type="olmo"),
    "olmo clipped": dict(model_type="olmo", clip_qkv=0.5, attention_bias=True, tie_word_embeddings=True),
    "gpt2": dict(model_type="gpt2", num_key_value_heads=None, n_inner=100),
    "gpt2 unscaled": dict(
        model_type="gpt2", num_attention_heads=6, num_key_value_heads=None, scale_attn_by_inverse_layer_idx=True,
        scale_attn_weights=False, activation_function="gelu", tie_word_embeddings=False,
    ),
    "opt": dict(model_type="opt", num_key_value_heads=None, ffn_dim=100),
    "opt without biases": dict(
        model_type="opt", num_key_value_heads=None, ffn_dim=100, enable_bias=False, tie_word_embeddings=False,
        num_attention_heads=6,
    ),
    "stablelm": dict(model_type="stablelm", num_attention_heads=6, num_key_value_heads=6, use_qkv_bias=True),
    "stablelm parallel": dict(
        model_type="stablelm", num_attention_heads=6, num_key_value_heads=1, use_parallel_residual=True,
        qk_layernorm=True, partial_rotary_factor=0.5, tie_word_embeddings=True,
    ),
    "starcoder2": dict(model_type="starcoder2", sliding_window=7),
    "starcoder2 without biases": dict(
        model_type="starcoder2", use_bias=False, tie_word_embeddings=False, num_attention_heads=6,
        num_key_value_heads=1,
    ),
    "gpt_bigcode": dict(model_type="gpt_bigcode", num_key_value_heads=None, n_inner=100, activation_function="gelu"),
    "gpt_bigcode unscaled": dict(
        model_type="gpt_bigcode", num_attention_heads=6, num_key_value_heads=1, scale_attn_weights=False,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
MODELS |= HYBRIDS
