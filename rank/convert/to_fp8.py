"""Writes an FP8 checkpoint as DeepSeek-V3 and Qwen3 have it: e4m3 and an f32 scale for each 128 x 128 weights.

Nothing is calibrated: e4m3 rounds each weight to 3 bits behind the leading one, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...comm import mesh, threads
from ...errors import MODEL, FatalError
from ...kernels.quantized.e4m3 import E4M3_MAX
from ..model import architectures
from ..model.choices import model_length, names_of
from ..model.config import Config
from ..model.experts.fused import StackedLinear
from ..model.formats import dense
from ..model.layers.linear import Linear
from ..safetensors_header import read_index
from .writer import Writer

BLOCK = 128
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def write(source: Path, config: Config, writer: Writer, device: str, bar: Callable[..., Any]) -> dict[str, Any]:
    """Returns the quantization_config for config.json. bar: makes one by its total."""
    index, module = read_index(source), architectures.find(config.model_type)
    rename = module.Model.rename
    wanted = _linears(config)
    plain = [name.removesuffix(".weight") for name in index.files if rename(name) == "lm_head.weight"]
    found = 0
    with bar(len(index.files)) as progress:
        for file in dict.fromkeys(index.files.values()):
            with safe_open(source / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    tensor = opened.get_tensor(name)
                    if tensor.dim() == 2 and rename(name).removesuffix(".weight") in wanted:
                        found += 1
                        codes, scales = encode(tensor.to(device))
                        writer.add(name, codes)
                        writer.add(f"{name}_scale_inv", scales)
                    else:
                        writer.add(name, tensor)
                    progress.update()
    if not found:
        raise FatalError(f"{source}: none of its linears has a tensor of its own, so that none can become FP8", MODEL)
    return SETTINGS | ({"modules_to_not_convert": plain} if plain else {})


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] → e4m3 [O, I], and of each block its scale, max|w| / 448."""
    (outputs, inputs), codes = weight.shape, torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = weight.new_empty(-(-outputs // BLOCK), -(-inputs // BLOCK), dtype=torch.float32)
    for row in range(len(scales)):
        part = weight[row * BLOCK : (row + 1) * BLOCK].float()
        blocks = torch.nn.functional.pad(part, (0, -inputs % BLOCK)).unflatten(1, (-1, BLOCK))
        scales[row] = blocks.abs().amax((0, 2)) / E4M3_MAX
        by = torch.where(scales[row] == 0, 1, scales[row]).repeat_interleave(BLOCK)[:inputs]
        codes[row * BLOCK : (row + 1) * BLOCK] = (part / by).clamp(-E4M3_MAX, E4M3_MAX).to(codes.dtype)
    return codes, scales


def _linears(config: Config) -> set[str]:
    """The paths of all linears but the head, experts' too, by the model's names."""
    module = architectures.find(config.model_type)
    alone = threads.run(lambda comm: mesh.build(comm, 1, 1), 1)[0]
    names = names_of(config, module.Model, read_index(config.path))
    model = module.Model(module.Args.from_config(config), alone, model_length(0, config), names, dense)
    found: set[str] = set()
    for layer in model.modules():
        if isinstance(layer, Linear) and layer is not model.lm_head:
            found |= {source.path for part in layer.parts for source in part.sources}  # type: ignore[union-attr]
        elif isinstance(layer, StackedLinear):
            for source in layer.sources:
                found |= {source.path.replace("{}", str(number)) for number in range(layer.experts.size)}
    return found
