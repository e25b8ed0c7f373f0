"""Llama 1 to 3 (Touvron et al. 2023, arXiv 2302.13971; arXiv 2407.21783) and the many models of its shape."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....kernels.halves import feed_forward
from ....kernels.rope import Rotation
from ...exits import MODEL, Stop
from .. import base
from ..batch import Batch
from ..layers.attention import PagedAttention
from ..layers.linear import QKV, Gated, Row
from ..layers.norm import StreamNorm


@dataclass(frozen=True, kw_only=True)
class Args(base.Args):
    intermediate_size: int
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.hidden_act not in ("silu", "swish"):
            raise Stop(f"activation {self.hidden_act!r} is not supported; supported is silu", MODEL)


class Attention(nn.Module):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__()
        hidden, heads, dim, bias = args.hidden_size, args.num_attention_heads, args.head_dim, args.attention_bias
        self.qkv_proj = QKV(hidden, heads, args.num_key_value_heads, dim, mesh, bias)
        self.o_proj = Row(heads * dim, hidden, mesh, bias)
        self.attention = PagedAttention(dim, local)

    def forward(
        self, x: Tensor, residual: Tensor | None, norm: StreamNorm, turn: Rotation, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        return self.attention(x, residual, norm, self.qkv_proj, self.o_proj, turn, batch)


class MLP(nn.Module):
    def __init__(self, args: Args, mesh: Mesh):
        super().__init__()
        hidden, inner = args.hidden_size, args.intermediate_size
        self.gate_up_proj = Gated(hidden, inner, mesh, args.mlp_bias)
        self.down_proj = Row(inner, hidden, mesh, args.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor | None, norm: StreamNorm) -> tuple[Tensor, Tensor]:
        return feed_forward(x, residual, norm, self.gate_up_proj.product, self.down_proj.product)


class Layer(base.Layer):
    ATTENTION: type[Attention] = Attention

    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.input_layernorm = StreamNorm(args.hidden_size, args.rms_norm_eps, mesh)
        self.self_attn = self.ATTENTION(args, mesh, index, local)
        self.post_attention_layernorm = StreamNorm(args.hidden_size, args.rms_norm_eps, mesh)
        self.mlp = MLP(args, mesh)

    def halves(self) -> tuple[tuple[StreamNorm, base.Half], ...]:
        return (self.input_layernorm, self.attend), (self.post_attention_layernorm, self.feed_forward)

    def attend(self, x: Tensor, residual: Tensor | None, turn: Rotation, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.self_attn(x, residual, self.input_layernorm, turn, batch)

    def feed_forward(self, x: Tensor, residual: Tensor | None, turn: Rotation, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.mlp(x, residual, self.post_attention_layernorm)


class Model(base.Model):
    LAYER = Layer
    MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
