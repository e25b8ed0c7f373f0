"""Apertus (Project Apertus 2025, arXiv 2509.14233): Llama with QK norm and an ungated MLP, whose activation xIELU has
learned parameters."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ....comm.mesh import Mesh
from ....kernels.activation.activation import XIELU_BETA, xielu
from ....kernels.rope.rope import CosSin
from .. import base
from ..batch import Batch
from ..layers.linear import ColumnParallel, RowParallel
from ..layers.norm import AddRMSNorm
from ..layers.residual import Normed, Partial, ResidualStream
from ..shard import even, whole
from ..weights.slicing import Field, ShardedModule
from . import llama, qwen3

CONFIG = {
    "defaults": {
        "rope_theta": 12000000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
}


@dataclass(frozen=True, kw_only=True)
class Args(llama.Args):
    rms_norm_eps: float = 1e-5
    hidden_act: str = "xielu"

    def __post_init__(self) -> None:
        base.expect("hidden_act", self.hidden_act, "xielu")


class XIELU(ShardedModule):
    """The activation. Checkpoints store its two factors so that any real number means a positive one."""

    fields = (Field("alpha_p", "o"), Field("alpha_n", "o"))

    def __init__(self) -> None:
        super().__init__()
        self.outputs = (whole(1),)
        self.alpha_p = nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)

    def finish(self) -> None:
        self.positive = softplus(self.alpha_p.float()).item()
        self.negative = XIELU_BETA + softplus(self.alpha_n.float()).item()

    def forward(self, x: Tensor) -> Tensor:
        return xielu(x, self.positive, self.negative)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int, mesh: Mesh):
        super().__init__()
        self.up_proj = ColumnParallel(whole(hidden), (even(inner, mesh.tensor.rank, mesh.tensor.size),), bias=False)
        self.act_fn = XIELU()
        self.down_proj = RowParallel(inner, hidden, mesh)

    def forward(self, h: Normed) -> Partial:
        return self.down_proj(self.act_fn(self.up_proj(h)))


class Layer(base.Layer):
    def __init__(self, args: Args, mesh: Mesh, index: int, local: int):
        super().__init__(args, mesh, index, local)
        self.attention_layernorm = AddRMSNorm(args.hidden_size, args.rms_norm_eps)
        self.self_attn = qwen3.Attention(args, mesh, index, local)
        self.feedforward_layernorm = AddRMSNorm(args.hidden_size, args.rms_norm_eps)
        self.mlp = MLP(args.hidden_size, args.intermediate_size, mesh)

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        yield (h := self.attention_layernorm(stream))
        stream.add(self.self_attn(h, cos_sin, batch))
        yield (h := self.feedforward_layernorm(stream))
        stream.add(self.mlp(h))


class Model(base.Model):
    LAYER = Layer
