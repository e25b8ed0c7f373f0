"""Gemma 4 that sees (Gemma team 2026); what hears is left out."""

from __future__ import annotations

from dataclasses import dataclass

from .. import base
from ..vision import gemma4
from . import gemma4_text

CONFIG = {"text_type": "gemma4_text"}


@dataclass(frozen=True, kw_only=True)
class Args(gemma4_text.Args, base.SeeingArgs):
    pass


class Model(base.SeeingModel, gemma4_text.Model):
    PREFIXES = (
        base.SeeingModel.PREFIXES
        | base.PROJECTED
        | {f"{under}embed_vision.": "vision.projector." for under in ("", "model.")}
    )
    LEFT_OUT = base.TextOfMultimodal.LEFT_OUT + tuple(
        f"{under}{part}." for under in ("", "model.") for part in ("audio_tower", "embed_audio")
    )
    TOWER = gemma4.Tower
