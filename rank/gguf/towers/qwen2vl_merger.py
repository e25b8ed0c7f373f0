"""Qwen2-VL's tower."""

from __future__ import annotations

from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from . import _qwen, size

MODELS = {"qwen2": "qwen2_vl"}
TOKENS = _qwen.TOKENS
UP = "v.blk.{}.ffn_up"
NAMES = UP, "v.blk.{}.ffn_down"
LINEARS = "vision.blocks.{}.mlp.fc1", "vision.blocks.{}.mlp.fc2"
TENSORS = _qwen.TENSORS | {"v.post_ln": "vision.merger.ln_q", "mm.{}": "vision.merger.mlp.{}"}


def config(m: Metadata) -> dict[str, Any]:
    found, hidden = _qwen.config(m), size(m, "embedding_length")
    del found["vision_config"]["hidden_size"]  # in config.json the text model's
    ratio = max(_up(m)) / hidden
    vision = found["vision_config"] | {"embed_dim": hidden, "mlp_ratio": ratio}
    return found | {"vision_config": vision, "image_processor": _qwen.PUBLISHED | found["image_processor"]}


def tensors(m: Metadata) -> dict[str, str]:
    inner, inputs = _up(m)
    # Files of llama.cpp's first script for this model call each linear by the other's name.
    names = NAMES if inner >= inputs else NAMES[::-1]
    return TENSORS | dict(zip(names, LINEARS, strict=True))


def _up(m: Metadata) -> tuple[int, int]:
    """Outputs and inputs of the first MLP's linear up. The metadata's feed_forward_length is the text model's hidden
    size, or 0."""
    up = m.tensor(UP.format(0) + ".weight")
    if up is None or len(up.shape) != 2:
        raise FatalError(f"{m.file} has no matrix {UP.format(0)}.weight", MODEL)
    outputs, inputs = up.shape
    return outputs, inputs
