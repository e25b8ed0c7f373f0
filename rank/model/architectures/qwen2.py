"""Qwen2 and Qwen2.5, dense (Yang et al. 2024, arXiv 2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..base import Count
from ..config import FULL, SLIDING
from ..layers.attention import layer_type
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index in range(self.num_hidden_layers):
            self.window(index)  # so that all ranks refuse a wrong type, whichever stage has the layer

    @property
    def qkv_bias(self) -> bool:
        return True

    @property
    def o_bias(self) -> bool:
        return False

    def window(self, index: int) -> int:
        if not self.use_sliding_window or self.sliding_window is None:
            return 0
        return self.sliding_window if self.layer_type(index) == SLIDING else 0

    def layer_type(self, index: int) -> str:
        return layer_type(self.layer_types, index, SLIDING if index >= self.max_window_layers else FULL)


Model = llama.Model
