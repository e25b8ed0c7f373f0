"""Apertus (Project Apertus 2025, arXiv 2509.14233): Llama with QK norm and an ungated MLP, whose activation xIELU has
learned parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import softplus

from ....comm.mesh import Mesh
from ....kernels.activation.activation import XIELU_BETA, xielu
from .. import base
from ..layers.feed_forward import Dense
from ..layers.linear import ColumnParallel, RowParallel
from ..layers.residual import Normed, Partial
from ..shard import even, whole
from ..weights.slicing import Field, ShardedModule, parameter
from . import llama

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
    qk_norm: ClassVar[bool] = True

    rms_norm_eps: float = 1e-5
    hidden_act: str = "xielu"

    def __post_init__(self) -> None:
        base.expect("hidden_act", self.hidden_act, "xielu")

    def feed_forward(self, index: int) -> XieluDense:
        return XieluDense(self.intermediate_size, self.hidden_act)


class XIELU(ShardedModule):
    """The activation. Checkpoints store its two factors so that any real number means a positive one."""

    fields = (Field("alpha_p", "o"), Field("alpha_n", "o"))

    def __init__(self) -> None:
        super().__init__()
        self.outputs = (whole(1),)
        self.alpha_p = parameter(1)
        self.alpha_n = parameter(1)

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


class XieluDense(Dense):
    def make(self, hidden: int, mesh: Mesh) -> MLP:
        return MLP(hidden, self.inner, mesh)


class Model(llama.Model):
    RENAMED = {
        ".attention_layernorm.": ".input_layernorm.", ".feedforward_layernorm.": ".post_attention_layernorm.",
    }  # fmt: skip
