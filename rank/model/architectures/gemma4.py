"""Gemma 4 with vision and sound (Gemma team 2026), of which the text model is served."""

from __future__ import annotations

from .. import base
from . import gemma4_text

CONFIG = {
    "text_type": "gemma4_text",
    "defaults": {
        "head_dim": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    },
    "rope_per_layer_type": True,
}

Args = gemma4_text.Args


class Model(base.TextOfMultimodal, gemma4_text.Model):
    LEFT_OUT = base.TextOfMultimodal.LEFT_OUT + tuple(
        f"{under}{part}." for under in ("", "model.") for part in ("audio_tower", "embed_vision", "embed_audio")
    )
