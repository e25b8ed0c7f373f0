"""Qwen2 and Qwen2.5, dense (Yang et al. 2024, arXiv 2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....errors import MODEL, FatalError
from ....kernels.attention.attention import AttentionParams
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        named, layers = len(self.layer_types), self.num_hidden_layers
        # More entries than layers are allowed: models with layers removed have them.
        if self.use_sliding_window and self.sliding_window is not None and 0 < named < layers:
            entries = "1 entry" if named == 1 else f"{named} entries"
            raise FatalError(
                f"config.json: layer_types has {entries}, but num_hidden_layers is {layers}; with use_sliding_window "
                "it says for each layer whether attention slides",
                MODEL,
            )

    @property
    def qkv_bias(self) -> bool:
        return True

    @property
    def o_bias(self) -> bool:
        return False

    def attention_params(self, index: int) -> AttentionParams:
        return AttentionParams(scale=self.head_dim**-0.5, window=self._window(index))

    def _window(self, index: int) -> int:
        """A layer's sliding window in tokens; 0: none."""
        if not self.use_sliding_window or self.sliding_window is None:
            return 0
        slides = self.layer_types[index] == "sliding_attention" if self.layer_types else index >= self.max_window_layers
        return self.sliding_window if slides else 0


Model = llama.Model
