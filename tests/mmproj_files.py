"""Writes checkpoints that take images as llama.cpp's converter does: a GGUF file of the text model, a mmproj file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import gguf_files

# model_type → GGUF's name of the text model's architecture, the text model's own type, and the projector's
KINDS = {
    "qwen2_vl": ("qwen2vl", "qwen2", gguf.VisionProjectorType.QWEN2VL),
    "qwen2_5_vl": ("qwen2vl", "qwen2", gguf.VisionProjectorType.QWEN25VL),
    "qwen3_vl": ("qwen3vl", "qwen3", gguf.VisionProjectorType.QWEN3VL),
    "qwen3_vl_moe": ("qwen3vlmoe", "qwen3_moe", gguf.VisionProjectorType.QWEN3VL),
    "qwen3_5": ("qwen35", "qwen3_5_text", gguf.VisionProjectorType.QWEN3VL),
    "gemma3": ("gemma3", "gemma3_text", gguf.VisionProjectorType.GEMMA3),
    "mistral3": ("mistral3", "mistral", gguf.VisionProjectorType.PIXTRAL),
}
TOWERS = "visual.", "vision_tower.", "multi_modal_projector."


def write(
    checkpoint: Path, folder: Path, kind: str = "F32", tokenizer: dict[str, Any] | None = None, swapped: bool = False
) -> list[Path]:
    """Both files, in a new folder. kind: the type of the tower's matrices. swapped: the names of MLPs' linears."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    architecture, text_type, _ = KINDS[config["model_type"]]
    if config["text_config"]["model_type"] == "mistral4":
        architecture = text_type = "mistral4"
    vision, text = {}, {}
    for name, x in tensors.items():
        prefix = next((one for one in TOWERS if one in name), None)
        if prefix is not None:
            name = name[name.index(prefix) :]
            if config["model_type"] == "gemma3" and "vision_model." not in name:  # as published
                name = name.replace("vision_tower.", "vision_tower.vision_model.")
            vision[name] = x
        else:
            text[name.replace("language_model.model.", "model.").replace("model.language_model.", "model.")] = x
    text = {name.replace("language_model.lm_head.", "lm_head."): x for name, x in text.items()}
    folder.mkdir()
    (folder / "text").mkdir()
    tied = config.get("tie_word_embeddings", False)
    keys = config["text_config"] | {"model_type": text_type, "tie_word_embeddings": tied}
    (folder / "text" / "config.json").write_text(json.dumps(keys))
    save_file(text, folder / "text" / "model.safetensors")
    file = gguf_files.write(folder / "text", folder / "model.gguf", architecture=architecture, tokenizer=tokenizer)
    return [file, _mmproj(config, vision, folder / "mmproj.gguf", kind, swapped)]


def _mmproj(config: dict[str, Any], tensors: dict[str, Tensor], file: Path, kind: str, swapped: bool) -> Path:
    vision, writer = config["vision_config"], gguf.GGUFWriter(file, "clip")
    if config["model_type"] == "qwen2_vl":  # as the converter renames them
        vision = vision | {"intermediate_size": vision["hidden_size"], "hidden_size": vision["embed_dim"]}
    model_type, hidden = config["model_type"], vision["hidden_size"]
    layers = vision.get("depth") or vision["num_hidden_layers"]
    heads = vision.get("num_heads") or vision["num_attention_heads"]
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(KINDS[model_type][2])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(hidden)
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(layers)
    writer.add_vision_head_count(heads)
    for name in ("image_mean", "image_std"):
        getattr(writer, f"add_vision_{name}")(_processor(model_type)[name])
    if model_type == "qwen2_5_vl":
        writer.add_vision_image_size(560)
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_uint32("clip.vision.window_size", vision["window_size"])
        writer.add_vision_use_silu(True)
    elif model_type == "qwen2_vl":
        writer.add_vision_image_size(560)
        writer.add_vision_attention_layernorm_eps(1e-6)
    elif model_type in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5"):
        writer.add_vision_image_size(int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"])
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        writer.add_vision_is_deepstack_layers([i in vision.get("deepstack_visual_indexes", ()) for i in range(layers)])
        writer.add_vision_use_gelu(True)
    elif model_type == "gemma3":
        patches = vision["image_size"] // vision["patch_size"]
        writer.add_vision_image_size(vision["image_size"])
        writer.add_vision_projector_scale_factor(patches // round(config["mm_tokens_per_image"] ** 0.5))
        writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
        writer.add_vision_use_gelu(True)
    else:
        writer.add_vision_image_size(200)
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
        writer.add_vision_use_silu(True) if vision["hidden_act"] == "silu" else writer.add_vision_use_gelu(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers + 2)
    for name, x in tensors.items():
        for theirs, part in _converted(name, x, vision, heads, names).items():
            fits = x.dim() == 2 and not part.shape[-1] % 32 and "position" not in theirs
            wanted = Type[kind] if fits else Type.F32
            if swapped and ".ffn_" in theirs:
                theirs = theirs.replace("up", "down") if "up" in theirs else theirs.replace("down", "up")
            writer.add_tensor(theirs, gguf.quants.quantize(part.contiguous().numpy(), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _processor(model_type: str) -> dict[str, list[float]]:
    if model_type in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma3"):
        return {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _converted(
    name: str, x: Tensor, vision: dict[str, Any], heads: int, names: gguf.TensorNameMap
) -> dict[str, Tensor]:
    """The tensors that one becomes, by their names in the file."""
    ending = name.rpartition(".")[2]
    if name == "visual.patch_embed.proj.weight":
        return {"v.patch_embd.weight": x[:, :, 0], "v.patch_embd.weight.1": x[:, :, 1]}
    if name.startswith("visual.deepstack_merger_list."):
        _, _, number, part, _ = name.split(".")
        layer = vision["deepstack_visual_indexes"][int(number)]
        return {f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{ending}": x}
    if name.startswith("visual.merger.linear_fc"):
        return {f"mm.{0 if 'fc1' in name else 2}.{ending}": x}
    if name.startswith("visual.merger.norm."):
        return {f"v.post_ln.{ending}": x}
    if ".qkv." in name and ("fullatt_block_indexes" in vision or "embed_dim" in vision):
        parts = zip("qkv", x.chunk(3), strict=True)
        return {names.get_name(name.replace(".qkv.", f".{one}."), (".weight", ".bias")): part for one, part in parts}
    if name == "multi_modal_projector.mm_input_projection_weight":
        return {"mm.input_projection.weight": x}
    if "soft_emb_norm" in name:
        x = x + 1
    if ".attention." in name and name.endswith(("q_proj.weight", "k_proj.weight")):  # Pixtral's
        x = x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    theirs = names.get_name(name, (".weight", ".bias"))
    assert theirs, name
    return {theirs: x}
