"""The tensors of Kimi Linear as llama.cpp's converter writes them, and their metadata."""

from __future__ import annotations

from typing import Any

import gguf
from torch import Tensor


def metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv([int(one == "full_attention") for one in config["layer_types"]])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length(latent + rotated)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def converted(name: str, x: Tensor) -> tuple[str, Tensor]:
    """A checkpoint's tensor as a name that gguf-py's map knows, and a tensor."""
    if name.endswith("conv1d.weight"):
        x = x[None]  # [1, channels, 1, taps]
    return name.replace(".dt_bias", ".dt_proj.bias"), -x.exp() if name.endswith(".A_log") else x
