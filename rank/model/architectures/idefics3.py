"""Idefics 3 (Laurençon et al. 2024, arXiv 2408.12637): Llama that sees an image in squares and whole."""

from __future__ import annotations

from dataclasses import dataclass

from .. import base
from ..vision import idefics3
from . import llama

CONFIG = {"text_type": "llama"}


@dataclass(frozen=True, kw_only=True)
class Args(base.SeeingArgs, llama.Args):
    pass


class Model(base.SeeingModel, llama.Model):
    PREFIXES = {
        "model.text_model.": "model.",
        "model.vision_model.": "vision.tower.",
        "model.connector.modality_projection.": "vision.projector.",
    }
    LEFT_OUT = "model.vision_model.", "model.connector."
    TOWER = idefics3.Tower
