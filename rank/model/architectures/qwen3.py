"""Qwen3, dense (Yang et al. 2025, arXiv 2505.09388): Llama with a norm on each query's and key's head."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ....comm.mesh import Mesh
from ....kernels.rope import Rotation
from ..batch import Batch
from ..layers.attention import PagedAttention
from ..layers.norm import RMSNorm, StreamNorm
from . import llama


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: list[str] = field(default_factory=list)

    def window(self, index: int) -> int:
        """Of a layer; 0 is none."""
        if not self.use_sliding_window or self.sliding_window is None:
            return 0
        slides = self.layer_types[index] == "sliding_attention" if self.layer_types else index >= self.max_window_layers
        return self.sliding_window if slides else 0


class Attention(llama.Attention):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.q_norm = RMSNorm(args.head_dim, args.rms_norm_eps)
        self.k_norm = RMSNorm(args.head_dim, args.rms_norm_eps)
        self.attention = PagedAttention(args.head_dim, local, args.window(index))

    def forward(
        self, x: Tensor, residual: Tensor | None, norm: StreamNorm, turn: Rotation, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        norms = self.q_norm, self.k_norm
        return self.attention(x, residual, norm, self.qkv_proj, self.o_proj, turn, batch, norms)


class Layer(llama.Layer):
    ATTENTION = Attention


class Model(llama.Model):
    LAYER = Layer
