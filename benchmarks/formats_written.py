"""Checkpoints of the formats that `phalanx convert` does not write, for benchmarks/formats.py: of compressed-tensors by
torch from their published layout, of MXFP4 by gguf-py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Pack = Callable[[Tensor], dict[str, Tensor]]  # a weight [O, I] → tensors by their endings
FILES = "tokenizer.json", "tokenizer_config.json"


def integers(bits: int, group: int, packed: bool) -> Pack:
    """group: inputs that share a scale; 0: a whole row. packed: in 32-bit integers, each code more by half of the
    range."""

    def pack(weight: Tensor) -> dict[str, Tensor]:
        groups, most = weight.float().unflatten(1, (-1, group or weight.shape[1])), 2 ** (bits - 1)
        scales = (groups.abs().amax(2) / (most - 0.5)).to(torch.bfloat16)
        codes = (groups / scales.float().unsqueeze(2)).round().clamp(-most, most - 1).flatten(1)
        if not packed:
            return {"weight": codes.to(torch.int8), "weight_scale": scales}
        several = (codes + most).long().unflatten(1, (-1, 32 // bits))
        words = (several << bits * torch.arange(32 // bits)).sum(2)
        signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        return {"weight_packed": signed, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}

    return pack


def floats(weight: Tensor) -> dict[str, Tensor]:
    """e4m3, a scale for each output."""
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def _weights(bits: int, strategy: str, group: int | None = None, type: str = "int") -> dict[str, Any]:
    return {"num_bits": bits, "type": type, "strategy": strategy, "group_size": group, "symmetric": True}


COMPRESSED: dict[str, tuple[str, dict[str, Any], Pack]] = {
    "w4a16": ("pack-quantized", _weights(4, "group", 64), integers(4, 64, True)),
    "w8a16": ("pack-quantized", _weights(8, "channel"), integers(8, 0, True)),
    "w8a8-int8": ("int-quantized", _weights(8, "channel"), integers(8, 0, False)),
    "w8a8-fp8": ("float-quantized", _weights(8, "channel", type="float"), floats),
}


def compressed(name: str, model: Path, target: Path) -> Path:
    """A checkpoint of compressed-tensors; embeddings, norms and the head stay as they are."""
    kind, weights, pack = COMPRESSED[name]
    target.mkdir()
    stored = dict[str, Tensor]()
    for key, x in load_file(model / "model.safetensors").items():
        if x.dim() < 2 or "layers" not in key:
            stored[key] = x
        else:
            stored |= {f"{key.removesuffix('weight')}{ending}": one for ending, one in pack(x).items()}
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    for file in FILES:
        shutil.copy(model / file, target)
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"], "config_groups": groups}
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": settings}
    (target / "config.json").write_text(json.dumps(config))
    return target


def mxfp4(plain: Path, target: Path) -> Path:
    """A GGUF file like `plain`, of f32, with gguf-py's MXFP4 in place of each layer's matrices."""
    reader, kind = gguf.GGUFReader(plain), gguf.GGMLQuantizationType.MXFP4
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key != "general.architecture" and not key.startswith("GGUF."):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for one in reader.tensors:
        if len(one.shape) == 2 and one.name.startswith("blk."):
            writer.add_tensor(one.name, gguf.quants.quantize(one.data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(one.name, one.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
