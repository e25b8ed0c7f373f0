"""The tensors of gated delta nets as llama.cpp's converter writes them, and their metadata."""

from __future__ import annotations

from typing import Any

import gguf
import torch
from torch import Tensor

KINDS = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"


def metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])


def converted(name: str, x: Tensor, config: dict[str, Any], together: bool) -> list[tuple[str, Tensor]]:
    """A checkpoint's tensor as names that gguf-py's map knows, and tensors. together: as Qwen3-Next's first files."""
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith("in_proj_qkvz.weight") and not together:
        parts = _apart(x, config)
        return [(name.replace("qkvz", "qkv"), parts[0]), (name.replace("qkvz", "z"), parts[1])]
    if "conv1d" in name:
        x = x.squeeze()
    if "linear_attn" in name and config["model_type"] != "qwen3_next":
        x = _tiled(name, x, config)
    return [(name, -x.exp() if name.endswith("A_log") else x)]


def _apart(x: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """For each key head its query, key, values and gates → all queries, keys and values; all gates."""
    heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    wide = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    q, k, v, z = (one.flatten(0, 1) for one in x.unflatten(0, (heads, -1)).split([key, key, wide, wide], 1))
    return torch.cat((q, k, v)), z.contiguous()


def _tiled(name: str, x: Tensor, config: dict[str, Any]) -> Tensor:
    """The first value head of each key head, then the second of each."""
    heads = config["linear_num_key_heads"]
    sizes = (heads, config["linear_num_value_heads"] // heads, -1)
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    if part == "norm":
        return x
    if part == "out_proj":
        return x.unflatten(1, sizes).transpose(1, 2).flatten(1).contiguous()
    before = 2 * heads * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0
    values = x[before:].unflatten(0, sizes).transpose(0, 1).flatten(0, 2)
    return torch.cat((x[:before], values))


def restored(name: str, x: Tensor, config: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """The reverse of `converted`, of Qwen3.5's matrices. tensors: the checkpoint's own."""
    if "linear_attn" not in name:
        return x
    like = tensors[name]
    place = _tiled(name, torch.arange(like.numel()).view(like.squeeze().shape), config)
    found = torch.empty(like.numel())
    found[place.flatten()] = x.flatten()
    return found.view(like.shape)
