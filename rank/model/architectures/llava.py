"""LLaVA 1.5 (Liu et al. 2023, arXiv 2310.03744): Llama, Mistral or Qwen2 that see; with another encoder, Pixtral."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...vision.mistral3 import Rules
from .. import base
from ..vision import llava
from . import llama, mistral3, qwen2


@dataclass(frozen=True, kw_only=True)
class LlamaArgs(base.SeeingArgs, llama.Args):
    pass


@dataclass(frozen=True, kw_only=True)
class Qwen2Args(base.SeeingArgs, qwen2.Args):
    pass


CONFIG = {"text_type": "llama"}


class Args(mistral3.Args):
    TEXT: ClassVar[dict[str, type[base.SeeingArgs]]] = {
        "llama": LlamaArgs,
        "mistral": mistral3.MistralArgs,
        "qwen2": Qwen2Args,
    }


class Model(base.SeeingModel, llama.Model):
    PREFIXES = base.SeeingModel.PREFIXES | base.PROJECTED
    TOWER: ClassVar[type[base.Tower]] = llava.Tower

    @classmethod
    def tower_class(cls, args: base.SeeingArgs) -> type[base.Tower]:
        return llava.PixtralTower if isinstance(args.rules, Rules) else cls.TOWER
