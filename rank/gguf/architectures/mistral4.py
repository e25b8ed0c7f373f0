"""Mistral Small 4: DeepSeek's entries. Files made from config.json lack the attention temperature; those made from
Mistral's own params.json have it, and are `deepseek2`."""

from __future__ import annotations

from typing import Any

from ..metadata import Metadata
from . import deepseek2

TENSORS, ENDINGS = deepseek2.TENSORS, deepseek2.ENDINGS
BETA = 0.1  # of the attention temperature, in the models there are


def config(m: Metadata) -> dict[str, Any]:
    keys = deepseek2.config(m)
    return keys | {
        "model_type": "mistral4",
        "rope_parameters": {
            "llama_4_scaling_beta": BETA,
            "original_max_position_embeddings": m.integer("context_length"),
        }
        | keys["rope_parameters"],
    }
