"""SmolLM3 (Hugging Face 2025): Llama, of whose layers every fourth rotates nothing and may have a window."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....errors import MODEL, FatalError
from ..base import Count
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from ..layers.rope import NONE, Parameters
from . import llama

CONFIG = {"defaults": {"rope_theta": 2e6}}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    no_rope_layers: list[int] = field(default_factory=list)  # of each layer: 1 where it rotates, 0 where it does not
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: Count | None = None
    layer_types: list[str] = field(default_factory=list)
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        listed, layers = len(self.no_rope_layers), self.num_hidden_layers
        if self.no_rope_layers and listed < layers:
            raise FatalError(f"config.json: no_rope_layers has {listed} entries for {layers} layers", MODEL)
        if self.no_rope_layer_interval < 1:
            raise FatalError(
                f"config.json: no_rope_layer_interval is {self.no_rope_layer_interval}, expected at least 1", MODEL
            )

    def rotates(self, index: int) -> bool:
        if self.no_rope_layers:
            return bool(self.no_rope_layers[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def rope(self, index: int) -> Parameters:
        return self.rope_parameters if self.rotates(index) else NONE

    def window(self, index: int) -> int:
        kind = layer_type(self.layer_types, index, FULL if self.rotates(index) else SLIDING)
        return self.sliding_window or 0 if self.use_sliding_window and kind == SLIDING else 0


Model = llama.Model
