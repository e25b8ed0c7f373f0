"""Writes GGUF files with gguf-py: of tiny checkpoints as llama.cpp's converter writes them, and tokenizers."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import gguf_delta_nets, gguf_kimi_linear, gguf_mamba2

PLAIN = (Type.F32, Type.F16, Type.BF16)
# Types that gguf-py decodes only → where their blocks have scales of f16
SCALES = {
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,), Type.IQ2_XXS: (0,), Type.IQ2_XS: (0,), Type.IQ2_S: (0,), Type.IQ3_XXS: (0,), Type.IQ3_S: (0,),
    Type.IQ1_S: (0,),
}  # fmt: skip
# Whose queries and keys are written as interleaved pairs.
PAIRED = (
    "arcee", "granite", "granitemoe", "granitemoehybrid", "llama", "ministral3", "mistral", "mixtral", "olmo",
    "smollm3",
)  # fmt: skip


def write(
    checkpoint: Path,
    file: Path,
    kind: str | Callable[[str], str] = "F32",
    architecture: str = "",
    tokenizer: dict[str, Any] | None = None,
    shards: int = 1,
    together: bool = False,
    **extra: np.ndarray,
) -> Path:
    """kind: the type of matrices, one for all or by GGUF's name of the tensor. architecture: GGUF's name, where it is
    not model_type. together: projections of gated delta nets, and experts' gate and up. extra: tensors besides. Returns
    the first file."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] == "nemotron_h":  # transformers writes no number of layers
        config["num_hidden_layers"] = len(kinds := gguf_mamba2.types(config))
        architecture = "nemotron_h_moe" if "moe" in kinds else architecture
    architecture = architecture or ARCHITECTURES.get(config["model_type"], config["model_type"])
    tensors = _stacked(load_file(checkpoint / "model.safetensors"), config, together)
    most = -(-(len(tensors) + len(extra)) // shards)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=most if shards > 1 else 0)
    _metadata(writer, config, architecture, tensors)
    for key, value in (tokenizer or {}).items():
        _add(writer, key, value)
    for name, x in tensors.items():
        theirs = _theirs(name, config, architecture)
        if theirs == "output.weight" and config.get("tie_word_embeddings"):
            continue
        wanted = _wanted(kind, theirs) if x.dim() > 1 else Type.F32
        blocks = torch.from_numpy(_encoded(theirs, x, wanted)) if wanted not in PLAIN else x
        data = _converted(name, blocks, config).numpy()
        writer.add_tensor(theirs, data if blocks is not x else gguf.quants.quantize(data, wanted), raw_dtype=wanted)
    for name, data in extra.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(file.parent.glob(f"{file.stem}-*.gguf"))[0] if shards > 1 else file


# model_type → GGUF's name of the architecture
ARCHITECTURES = {
    "mixtral": "llama", "mistral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "phi": "phi2", "glm4_moe": "glm4moe", "gpt_bigcode": "starcoder", "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2", "gpt_oss": "gpt-oss", "olmo3": "olmo2", "minimax_m2": "minimax-m2", "glm": "chatglm",
    "glm_moe_dsa": "glm-dsa", "ministral3": "mistral3",
    "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "llama4_text": "llama4", "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe", "granitemoehybrid": "granitehybrid", "gemma4_text": "gemma4",
    "falcon_h1": "falcon-h1", "cohere": "command-r", "kimi_linear": "kimi-linear",
}  # fmt: skip
LATENTS = "deepseek2", "glm-dsa", "mistral4"
# Their keys' and values' parts of what a latent goes through are two tensors.
NEWER_LATENTS = "deepseek_v3", "glm_moe_dsa", "mistral4", "kimi_linear"
# Names that gguf-py does not have.
NAMES = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj.weight": "ffn_up_exps.weight", "mixer.experts.down_proj.weight": "ffn_down_exps.weight",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias", "self_attn.sinks": "attn_sinks.weight",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    # transformers calls MLPs so, too.
    "block_sparse_moe.gate_proj.weight": "ffn_gate.weight", "block_sparse_moe.up_proj.weight": "ffn_up.weight",
    "block_sparse_moe.down_proj.weight": "ffn_down.weight",
    "self_attention.query_key_value.weight": "attn_qkv.weight",
    "self_attention.query_key_value.bias": "attn_qkv.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.w1.weight": "ffn_gate_exps.weight",
    "feed_forward.experts.w2.weight": "ffn_down_exps.weight",
    "feed_forward.experts.w3.weight": "ffn_up_exps.weight",
    "block_sparse_moe.experts.w1.weight": "ffn_gate_exps.weight",
    "block_sparse_moe.experts.w2.weight": "ffn_down_exps.weight",
    "block_sparse_moe.experts.w3.weight": "ffn_up_exps.weight",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    ".experts.gate_up_proj": "ffn_gate_up_exps.weight", ".experts.down_proj": "ffn_down_exps.weight",
    ".eh_proj.weight": "nextn.eh_proj.weight", ".enorm.weight": "nextn.enorm.weight",
    ".hnorm.weight": "nextn.hnorm.weight", ".shared_head.norm.weight": "nextn.shared_head_norm.weight",
}  # fmt: skip


def _theirs(name: str, config: dict[str, Any], architecture: str = "") -> str:
    """gguf-py's name of a checkpoint's tensor."""
    architecture = architecture or ARCHITECTURES.get(config["model_type"], config["model_type"])
    numbers = {arch: one for one, arch in gguf.MODEL_ARCH_NAMES.items()}
    layers = (config.get("num_hidden_layers") or config["n_layer"]) + (config.get("num_nextn_predict_layers") or 0)
    for ours, theirs in NAMES.items():
        if name.endswith(ours):
            return f"blk.{name.split('.')[2]}.{theirs}"
    found = gguf.get_tensor_name_map(numbers[architecture], layers).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found, name
    return found


def _metadata(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str, tensors: dict[str, Tensor]) -> None:
    """Keys that llama.cpp's converter writes for these model types."""

    def of(*keys: str, default: Any = None) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), default)

    hidden, heads = of("hidden_size", "n_embd"), of("num_attention_heads", "n_head")
    dim = of("head_dim", default=hidden // heads)
    writer.add_context_length(of("max_position_embeddings", "n_positions", "model_max_length"))
    writer.add_embedding_length(hidden)
    further = of("num_nextn_predict_layers", default=0)
    writer.add_block_count(of("num_hidden_layers", "n_layer") + further)
    if further:
        writer.add_nextn_predict_layers(further)
    inner = tensors.get("model.layers.0.feed_forward.w1.weight")  # LFM2 has it adjusted
    writer.add_feed_forward_length(
        len(inner) if inner is not None else of("intermediate_size", "n_inner", default=4 * hidden)
    )
    writer.add_head_count(heads)
    kv_heads = of("num_key_value_heads", default=1 if architecture == "starcoder" else heads)
    if architecture.startswith("lfm2"):
        kv_heads = [0 if one == "conv" else kv_heads for one in config["layer_types"]]
        writer.add_layer_norm_rms_eps(config.pop("norm_eps"))
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_head_count_kv(kv_heads)
    if (eps := of("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps")) is not None:
        writer.add_layer_norm_eps(eps)
    if (eps := of("rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if config.get("head_dim") and architecture not in (*LATENTS, "gemma4"):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    _rope(writer, config, dim, architecture)
    _experts(writer, config, architecture)
    _particular(writer, config, architecture, tensors)


def _experts(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    def of(*keys: str, default: Any = None) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), default)

    if experts := of("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(
            of("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
        )
        if inner := of("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(inner)
    if shared := of("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if architecture in ("glm4moe", "dots1", *LATENTS):
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(of("norm_topk_prob", default=False))
        writer.add_expert_group_count(config["n_group"] or 1)
        writer.add_expert_group_used_count(config["topk_group"] or 1)
    if architecture == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "ernie4_5-moe":
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    if architecture in ("gpt-oss", "minimax-m2", "hunyuan-moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def _particular(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str, tensors: dict[str, Tensor]) -> None:
    """Keys that few architectures have."""
    if config["model_type"] in gguf_delta_nets.KINDS:
        gguf_delta_nets.metadata(writer, config)
    if config["model_type"] in gguf_mamba2.KINDS:
        gguf_mamba2.metadata(writer, config)
    if architecture == "kimi-linear":
        gguf_kimi_linear.metadata(writer, config)
    if architecture == "apertus":
        _xielu(writer, config, tensors)
    if architecture == "llama4":
        writer.add_feed_forward_length(config["intermediate_size_mlp"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if architecture == "gemma4":
        _gemma4(writer, config)
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    if architecture in ("cohere2", "command-r"):
        writer.add_logit_scale(config["logit_scale"])
    if architecture in LATENTS:
        _latents(writer, config)
    if (
        architecture in ("gemma2", "gemma3", "gemma4", "phi3", "gpt-oss", "cohere2", "exaone4")
        or config["model_type"] == "olmo3"
    ):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "stablelm":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if architecture in ("granite", "granitemoe", "granitehybrid"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _xielu(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    def of_all_layers(part: str) -> list[float]:
        names = [f"model.layers.{i}.mlp.act_fn.{part}" for i in range(config["num_hidden_layers"])]
        return [tensors.pop(name).float().item() for name in names]

    writer.add_xielu_alpha_p(of_all_layers("alpha_p"))
    writer.add_xielu_alpha_n(of_all_layers("alpha_n"))
    writer.add_xielu_beta(of_all_layers("beta"))
    writer.add_xielu_eps(of_all_layers("eps"))


def _gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    layers, shared, inner = (config[key] for key in ("num_hidden_layers", "num_kv_shared_layers", "intermediate_size"))
    slides = [one == "sliding_attention" for one in config["layer_types"]]
    full = config["per_layer_config"][str(layers - 1)]
    dim, heads = full["head_dim"], config["num_key_value_heads"]
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(dim)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([inner * (1 + (i >= layers - shared)) for i in range(layers)])
    if "num_key_value_heads" in full:
        writer.add_head_count_kv([heads if one else full["num_key_value_heads"] for one in slides])
    rotated = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * dim / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (dim // 2 - rotated), np.float32))


def _latents(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Keys of V2 as files had them at first, of V3 as newer ones have them."""
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    newer = config["model_type"] in NEWER_LATENTS
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotated if newer else key)
    writer.add_value_length(latent if newer else value)
    if newer:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    if newer and config["model_type"] != "mistral4":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(rotated)
    if config.get("index_topk"):
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])


def _rope(writer: gguf.GGUFWriter, config: dict[str, Any], dim: int, architecture: str) -> None:
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    if (beta := full.get("llama_4_scaling_beta")) and architecture != "mistral4":
        writer.add_attn_temperature_scale(beta)
    stretched = full.get("alpha", 1.0) ** (dim / (dim - 2))
    writer.add_rope_freq_base(full.get("rope_theta", 10000.0) * stretched)
    if "sliding_attention" in rope and config["model_type"] != "olmo3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if sections := full.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    if full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        if full.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"] * (0.1 if architecture in LATENTS else 1))
    partial = config.get("partial_rotary_factor") or full.get("partial_rotary_factor")
    if partial is not None and full.get("rope_type") != "proportional":
        writer.add_rope_dimension_count(int(dim * partial))


def _stacked(tensors: dict[str, Tensor], config: dict[str, Any], together: bool = False) -> dict[str, Tensor]:
    """With one tensor of all experts, and of all heads' norms. Of some what files have apart, apart."""
    if config["model_type"] == "gpt_oss":
        tensors = dict(one for name, x in tensors.items() for one in _of_gpt_oss(name, x))
    if config["model_type"] in ("granitemoe", "granitemoehybrid"):
        tensors = dict(one for name, x in tensors.items() for one in _of_granite(name, x))
    if config["model_type"] == "llama4_text":
        tensors = dict(one for name, x in tensors.items() for one in _of_llama4(name, x))
    if config["model_type"] in NEWER_LATENTS:
        tensors = dict(one for name, x in tensors.items() for one in _of_latents(name, x, config))
    if config["model_type"] == "kimi_linear":
        tensors = dict(gguf_kimi_linear.converted(name, x) for name, x in tensors.items())
    if config["model_type"] == "glm" and config["attention_bias"]:
        tensors = _with_whole_qkv(tensors)
    if config["model_type"] in gguf_delta_nets.KINDS:
        changed = (gguf_delta_nets.converted(name, x, config, together) for name, x in tensors.items())
        tensors = dict(one for several in changed for one in several)
    if config["model_type"] in gguf_mamba2.KINDS:
        changed = (gguf_mamba2.converted(name, x, config) for name, x in tensors.items())
        tensors = dict(one for several in changed for one in several)
    found: dict[str, Any] = {}
    number = re.compile(r"\.(experts|norms)\.(\d+)(?=\.)")
    for name, x in tensors.items():
        if one := number.search(name):
            under = ".experts" if one[1] == "experts" else ""
            found.setdefault(number.sub(under, name), {})[int(one[2])] = x
        else:
            found[name] = x
    found = {
        name: torch.stack([x[i] for i in range(len(x))]) if isinstance(x, dict) else x for name, x in found.items()
    }
    for name in [one for one in found if one.endswith(".experts.gate_proj.weight") and together]:
        gate, up = found.pop(name), found.pop(name.replace("gate", "up"))
        found[name.replace("gate_proj", "gate_up_proj")] = torch.cat((gate, up), 1)
    return found


def _with_whole_qkv(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys as ChatGLM's own checkpoints have them."""
    found = {name: x for name, x in tensors.items() if not re.search(r"\.[qkv]_proj\.", name)}
    for name in tensors:
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("self_attn.q_proj", "self_attention.query_key_value")] = torch.cat(parts)
    return found


def _of_gpt_oss(name: str, x: Tensor) -> list[tuple[str, Tensor]]:
    """Its own have gate and up in turn, inputs before outputs."""
    if ".experts." not in name:
        return [(name, x)]
    stem, end = name.removesuffix("_bias"), ".bias" if name.endswith("_bias") else ".weight"
    x = x if name.endswith("_bias") else x.mT.contiguous()
    if "down_proj" in name:
        return [(f"{stem}{end}", x)]
    parts = ("gate_proj", x[:, 0::2]), ("up_proj", x[:, 1::2])
    return [(stem.replace("gate_up_proj", part) + end, one.contiguous()) for part, one in parts]


def _of_granite(name: str, x: Tensor) -> list[tuple[str, Tensor]]:
    """Gate and up apart, under the names that other models have."""
    stem = name.partition(".block_sparse_moe.")[0] + ".mlp.experts."
    if name.endswith("moe.input_linear.weight"):
        parts = zip(("gate_proj", "up_proj"), x.chunk(2, 1), strict=True)
        return [(f"{stem}{part}.weight", one.contiguous()) for part, one in parts]
    return [(f"{stem}down_proj.weight" if name.endswith("moe.output_linear.weight") else name, x)]


def _of_llama4(name: str, x: Tensor) -> list[tuple[str, Tensor]]:
    """Its own have gate and up together, inputs before outputs."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(name, x)]
    parts = zip(("gate", "up"), x.chunk(2, -1), strict=True) if "gate_up" in name else [("down", x)]
    return [(f"{name.rpartition('.')[0]}.{part}_proj.weight", one.mT.contiguous()) for part, one in parts]


def _of_latents(name: str, x: Tensor, config: dict[str, Any]) -> list[tuple[str, Tensor]]:
    if "kv_b_proj" not in name:
        return [(name, x)]
    heads = x.unflatten(0, (config["num_attention_heads"], -1))
    keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
    parts = ("k_b_proj", keys.mT), ("v_b_proj", values)
    return [(name.replace("kv_b_proj", part), one.contiguous()) for part, one in parts]


def _converted(name: str, x: Tensor, config: dict[str, Any]) -> Tensor:
    kind = config["model_type"]
    if kind in PAIRED:
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                x = x.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
    shifted = (
        (kind.startswith("gemma") and kind != "gemma4_text") or kind == "nemotron" or kind in gguf_delta_nets.KINDS
    )
    if shifted and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        x = x + 1
    return x.squeeze() if "shared_expert_gate" in name else x.squeeze(1) if name.endswith("conv.conv.weight") else x


def _wanted(kind: str | Callable[[str], str], name: str) -> Type:
    # llama.cpp does not quantise them
    if re.search(r"ssm_(conv1d(_[qkv])?|a|d|norm)\b|shortconv\.conv|ffn_gate_inp\.", name):
        return Type.F32
    return Type[kind if isinstance(kind, str) else kind(name)]


def _encoded(name: str, x: Tensor, wanted: Type) -> np.ndarray:
    """x [rows, inputs] in blocks. Of types that gguf-py does not encode random ones, with about x's deviation."""
    if wanted not in SCALES:
        return gguf.quants.quantize(x.float().numpy(), wanted)
    group, size = gguf.GGML_QUANT_SIZES[wanted]
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    blocks = draw.integers(0, 256, (*x.shape[:-1], x.shape[-1] // group, size), dtype=np.uint8)

    def scaled(factor: float) -> np.ndarray:
        for at in SCALES[wanted]:
            blocks[..., at : at + 2] = np.array([factor], np.float16).view(np.uint8)
        return blocks.reshape(*x.shape[:-1], -1)

    return scaled(float(x.std()) / gguf.quants.dequantize(scaled(1.0), wanted).std())


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def dequantised(checkpoint: Path, into: Path, kind: str | Callable[[str], str]) -> Path:
    """The checkpoint with the values that gguf-py makes of its own codes: what transformers is to compute with."""
    config = json.loads((checkpoint / "config.json").read_text())
    into.mkdir()
    tensors = load_file(checkpoint / "model.safetensors")
    for name, x in _stacked(tensors, config).items():
        theirs = _theirs(name, config)
        if x.dim() > 1 and (wanted := _wanted(kind, theirs)) != Type.F32:
            data = gguf.quants.dequantize(_encoded(theirs, x, wanted), wanted)
            made = torch.from_numpy(np.ascontiguousarray(data))
            if config["model_type"] in gguf_delta_nets.KINDS:
                made = gguf_delta_nets.restored(name, made, config, tensors)
            if name in tensors and tensors[name].shape == made.shape:
                tensors[name] = made
            elif (whole := _whole(name, made, tensors)) is not None:
                tensors |= whole
            elif ".experts." in name:
                stem, _, end = name.rpartition(".experts.")
                tensors |= {f"{stem}.experts.{i}.{end}": one.clone() for i, one in enumerate(made)}
            else:
                tensors[name] = made
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(config))
    return into


def _whole(name: str, x: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The tensor of a checkpoint with `x` in place of what was taken apart; None: it was not."""
    stem, _, part = name.removesuffix(".weight").rpartition(".")
    if part in ("k_b_proj", "v_b_proj"):
        held = tensors[f"{stem}.kv_b_proj.weight"].clone().unflatten(0, (len(x), -1))
        here = held[:, : x.shape[2]] if part == "k_b_proj" else held[:, -x.shape[1] :]
        here.copy_(x.mT if part == "k_b_proj" else x)
        return {f"{stem}.kv_b_proj.weight": held.flatten(0, 1)}
    if part == "bias":  # plain in all files
        return {}
    if f"{stem}.gate_up_proj" not in tensors:
        return None
    if part == "down_proj":
        return {f"{stem}.down_proj": x.mT.contiguous()}
    held = tensors[f"{stem}.gate_up_proj"].clone()
    held[..., 0 if part == "gate_proj" else 1 :: 2] = x.mT
    return {f"{stem}.gate_up_proj": held}


def tokenizer(directory: Path) -> dict[str, Any]:
    """The keys of a GGUF file for a byte-level tokenizer.json of GPT-2's kind, and its template."""
    data = json.loads((directory / "tokenizer.json").read_text())
    vocab, special = data["model"]["vocab"], {one["id"]: one["content"] for one in data["added_tokens"]}
    ids = vocab | {text: id for id, text in special.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in data["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokens.index(config["eos_token"]),
        "tokenizer.chat_template": (directory / "chat_template.jinja").read_text(),
    }
