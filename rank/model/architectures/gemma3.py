"""Gemma 3 that sees (Gemma team 2025, arXiv 2503.19786): the tokens of an image attend to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import base
from ..vision import gemma3
from . import gemma3_text

CONFIG = {"text_type": "gemma3_text"}


@dataclass(frozen=True, kw_only=True)
class Args(gemma3_text.Args, base.SeeingArgs):
    pass


class Model(base.SeeingModel, gemma3_text.Model):
    PREFIXES = base.SeeingModel.PREFIXES | base.PROJECTED
    TOWER: ClassVar[type[base.Tower]] = gemma3.Tower
