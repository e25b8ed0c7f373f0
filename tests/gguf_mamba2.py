"""The tensors of Mamba-2 layers as llama.cpp's converter writes them, and their metadata."""

from __future__ import annotations

from typing import Any

import gguf
import torch
from torch import Tensor

KINDS = "granitemoehybrid", "nemotron_h", "falcon_h1"


def metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    def of(*keys: str) -> Any:
        return next(config[key] for key in keys if config.get(key) is not None)

    heads = of("mamba_n_heads", "mamba_num_heads")
    writer.add_ssm_conv_kernel(of("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(of("mamba_d_state", "ssm_state_size"))
    writer.add_ssm_group_count(of("mamba_n_groups", "n_groups"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(_inner(config))
    if config["model_type"] == "granitemoehybrid":
        attend = [one in ("attention", "full_attention") for one in config["layer_types"]]
        writer.add_head_count_kv([config["num_key_value_heads"] if one else 0 for one in attend])
        writer.add_rope_scaling_finetuned(False)
        writer.add_context_length(2**20)
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["model_type"] == "nemotron_h":
        _nemotron(writer, config)


def _inner(config: dict[str, Any]) -> int:
    if config["model_type"] == "nemotron_h":
        return config["mamba_num_heads"] * config["mamba_head_dim"]
    if config["model_type"] == "falcon_h1":
        return config["mamba_d_ssm"]
    return config["mamba_expand"] * config["hidden_size"]


def types(config: dict[str, Any]) -> list[str]:
    """The types of Nemotron-H's layers."""
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    names |= {"linear_attention": "mamba", "full_attention": "attention"}
    given = config.get("layers_block_type") or config.get("layer_types") or config["hybrid_override_pattern"]
    return [names.get(one, one) for one in given]


def _nemotron(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds = types(config)
    writer.add_head_count_kv([config["num_key_value_heads"] if one == "attention" else 0 for one in kinds])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_context_length(2**20)
    routed = "moe" in kinds
    size = config["moe_intermediate_size" if routed else "intermediate_size"]
    writer.add_feed_forward_length([size if one == ("moe" if routed else "mlp") else 0 for one in kinds])
    if routed:
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if config["moe_latent_size"]:
            writer.add_moe_latent_size(config["moe_latent_size"])


def converted(name: str, x: Tensor, config: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """A checkpoint's tensor as names that gguf-py's map knows, and tensors."""
    if name.endswith("shared_mlp.input_linear.weight"):
        stem = _shared(name, config)
        return [(f"{stem}.{part}_proj.weight", one) for part, one in zip(("gate", "up"), x.chunk(2), strict=True)]
    if name.endswith("shared_mlp.output_linear.weight"):
        return [(f"{_shared(name, config)}.down_proj.weight", x)]
    if config["model_type"] == "falcon_h1":
        x = x * _multiplier(name, config)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith("conv1d.weight"):
        x = x.squeeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        x = x.unflatten(0, (config.get("mamba_n_groups") or config["n_groups"], -1))
    if name.endswith((".A_log", ".D")):
        x = (-x.exp() if name.endswith("A_log") else x)[:, None]
    return [(name, x)]


def _multiplier(name: str, config: dict[str, Any]) -> float | Tensor:
    """The factor that the converter multiplies into a tensor of Falcon-H1."""
    gate, down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "in_proj":
        values, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        widths = torch.tensor([values, values, keys, keys, config["mamba_n_heads"]])
        factors = torch.tensor(config["ssm_multipliers"]) * config["ssm_in_multiplier"]
        return factors.repeat_interleave(widths)[:, None]
    return {
        "gate_proj": gate, "down_proj": down, "q_proj": attention, "k_proj": attention * config["key_multiplier"],
        "v_proj": attention, "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }.get(part, 1.0)  # fmt: skip


def _shared(name: str, config: dict[str, Any]) -> str:
    return name.partition(".shared_mlp.")[0] + (".mlp.shared_experts" if config["num_local_experts"] else ".mlp")
