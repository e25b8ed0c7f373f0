"""OLMo 2, and OLMo 3: that has windows, of all layers but every fourth, whose rope alone is scaled.

Files may have another number than four. llama.cpp's converter writes whether each layer has a window, and
llama.cpp itself reads no such list but every how many layers one has none (src/models/olmo2.cpp), 0: all have one.
"""

from __future__ import annotations

from typing import Any

from ....errors import MODEL, FatalError
from ..metadata import Metadata
from ._common import DECODER, QK_NORM, layer
from ._common import config as common

TENSORS = (
    DECODER
    | QK_NORM
    | layer(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm")
)
WRITES = ("olmo2", "olmo3")
PATTERN = "attention.sliding_window_pattern"


def config(m: Metadata) -> dict[str, Any]:
    keys = common(m)
    if not (window := m.integer("attention.sliding_window", 0)):
        return keys | {"model_type": "olmo2"}
    rope = keys["rope_parameters"]
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    ropes = {"full_attention": {"rope_type": "default"} | rope, "sliding_attention": plain}
    return keys | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(m, keys["num_hidden_layers"]),
        "rope_parameters": ropes,
    }


def layer_types(m: Metadata, layers: int) -> list[str]:
    slides = m.values.get(f"{m.architecture}.{PATTERN}")
    if not isinstance(slides, list):
        period = m.integer(PATTERN, 4)
        slides = [period == 0 or (i + 1) % period != 0 for i in range(layers)]
    if len(slides) != layers:
        raise FatalError(f"{m.file}: {PATTERN} has {len(slides)} entries for {layers} layers", MODEL)
    return ["sliding_attention" if one else "full_attention" for one in slides]


def keys(raw: dict[str, Any]) -> dict[str, Any]:
    if raw["model_type"] != "olmo3" or not raw.get("sliding_window"):
        return {}
    ropes = raw["rope_parameters"]
    whole, sliding = ropes["full_attention"], ropes["sliding_attention"]
    if sliding["rope_type"] != "default" or sliding["rope_theta"] != whole["rope_theta"]:
        raise FatalError(
            f"GGUF files of olmo3 cannot say a rope of {sliding} in layers with a window beside a rope_theta of "
            f"{whole['rope_theta']} in the others",
            MODEL,
        )
    return {"attention.sliding_window": raw["sliding_window"], PATTERN: period(raw["layer_types"])}


def period(types: list[str]) -> int:
    """Every how many layers one has no window; 0: all have one."""
    full = [i for i, one in enumerate(types) if one == "full_attention"]
    period = full[0] + 1 if full else 0
    if full and full != list(range(full[0], len(types), period)):
        raise FatalError(
            f"GGUF files say every how many layers one has full_attention, but layer_types has it in layers "
            f"{', '.join(map(str, full))} of {len(types)}",
            MODEL,
        )
    return period
