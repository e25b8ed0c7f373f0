"""Mistral Small 3.1 and Ministral 3 with vision (Mistral AI 2025), of which the text model is served."""

from __future__ import annotations

from ....errors import MODEL, FatalError
from .. import base
from ..config import Config
from . import llama, ministral3, mistral

CONFIG = {"text_type": "mistral"}

TEXT: dict[str, type[mistral.Args]] = {"mistral": mistral.Args, "ministral3": ministral3.Args}


class Args(mistral.Args):
    @classmethod
    def from_config(cls, config: Config) -> mistral.Args:  # type: ignore[override]
        """The text model's Args: it may be of either type."""
        text = config.raw["model_type"]
        if text not in TEXT:
            raise FatalError(
                f"{config.file}: the text model of a mistral3 model is {text!r}, which is not supported; "
                f"supported are {', '.join(TEXT)}",
                MODEL,
            )
        return TEXT[text].from_config(config)


class Model(base.TextOfMultimodal, llama.Model):
    pass
