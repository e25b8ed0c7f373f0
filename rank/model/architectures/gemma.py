"""Gemma (Gemma team 2024, arXiv 2403.08295): Llama with GeGLU, scaled embeddings, and norm weights stored less 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....errors import MODEL, FatalError
from . import llama

CONFIG = {"defaults": {"head_dim": 256}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    norm_offset: ClassVar[float] = 1.0

    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    use_bidirectional_attention: bool = False

    def __post_init__(self) -> None:
        check_direction(self.use_bidirectional_attention)
        # The first checkpoints name gelu and mean its tanh approximation, with which they were trained.
        if self.hidden_act == "gelu":
            object.__setattr__(self, "hidden_act", "gelu_pytorch_tanh")

    @property
    def embed_scale(self) -> float:
        return self.hidden_size**0.5


def check_direction(both: bool) -> None:
    """Raises FatalError where tokens attend to those behind them, too."""
    if both:
        raise FatalError(
            "config.json: use_bidirectional_attention is true: such a model makes embeddings and no text, and is not "
            "supported",
            MODEL,
        )


Model = llama.Model
