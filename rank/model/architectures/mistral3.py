"""Mistral Small 3.1 and 4 and Ministral 3 with vision (Mistral AI 2025, 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ....errors import MODEL, FatalError
from .. import base
from ..config import Config
from ..vision import mistral3
from . import deepseek_v2, llama, ministral3, mistral, mistral4

CONFIG = {"text_type": "mistral"}


@dataclass(frozen=True, kw_only=True)
class MistralArgs(base.SeeingArgs, mistral.Args):
    pass


@dataclass(frozen=True, kw_only=True)
class Ministral3Args(base.SeeingArgs, ministral3.Args):
    pass


@dataclass(frozen=True, kw_only=True)
class Mistral4Args(base.SeeingArgs, mistral4.Args):
    pass


class Args(base.SeeingArgs, mistral.Args):
    TEXT: ClassVar[dict[str, type[base.SeeingArgs]]] = {
        "mistral": MistralArgs,
        "ministral3": Ministral3Args,
        "mistral4": Mistral4Args,
    }

    @classmethod
    def from_config(cls, config: Config) -> base.SeeingArgs:  # type: ignore[override]
        """The text model's Args: it may be of several types."""
        text = config.raw["model_type"]
        if text not in cls.TEXT:
            raise FatalError(
                f"{config.file}: the text model of a {config.model_type} model is {text!r}, which is not supported; "
                f"supported are {', '.join(cls.TEXT)}",
                MODEL,
            )
        return cls.TEXT[text].from_config(config)


class Model(base.SeeingModel, deepseek_v2.Model):
    PREFIXES = base.SeeingModel.PREFIXES | base.PROJECTED
    TOWER = mistral3.Tower

    @classmethod
    def layer_class(cls, args: Any) -> type[base.Layer]:
        return cls.LAYER if isinstance(args, Mistral4Args) else llama.Layer
