"""MLPs, gated and not, and their activations."""

from __future__ import annotations

from torch import Tensor, nn

from ....comm.mesh import Mesh
from ....errors import MODEL, FatalError
from ....kernels.activation.activation import CLAMPED, activate, clamped, kind
from ..shard import even, whole
from .linear import ColumnParallel, GatedColumnParallel, RowParallel
from .residual import Normed, Partial

# config.json's name of an activation → the kernels' name
NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def activation(name: str) -> str:
    """The kernels' name for an activation of config.json, or of `limited`."""
    if kind(name) in CLAMPED:
        return name
    if name not in NAMES:
        raise FatalError(f"activation {name!r} is not supported; supported are {', '.join(NAMES)}", MODEL)
    return NAMES[name]


def limited(kind: str, limit: float, key: str = "swiglu_limit") -> str:
    """The kernels' name for one of CLAMPED. Raises FatalError where kernels cannot take the limit that config.json has
    under `key`."""
    try:
        return clamped(kind, limit)
    except ValueError as error:
        raise FatalError(f"config.json: {key} is {limit}: {error}", MODEL) from None


class GatedMLP(nn.Module):
    """down(act(gate(h)) * up(h))."""

    def __init__(self, hidden: int, inner: int, mesh: Mesh, act: str, bias: bool = False):
        """act: the activation's name in config.json. Raises FatalError where it is unknown."""
        super().__init__()
        self.gate_up_proj = GatedColumnParallel(hidden, inner, mesh, activation(act), bias)
        self.down_proj = RowParallel(inner, hidden, mesh, bias)

    def forward(self, h: Normed | Tensor) -> Partial:
        return self.down_proj(self.gate_up_proj(h))


class MLP(nn.Module):
    """down(act(up(h)))."""

    def __init__(self, hidden: int, inner: int, mesh: Mesh, act: str, bias: bool = False):
        """act: the activation's name in config.json. Raises FatalError where it is unknown."""
        super().__init__()
        outputs = even(inner, mesh.tensor.rank, mesh.tensor.size)
        self.up_proj = ColumnParallel(whole(hidden), (outputs,), bias)
        self.down_proj = RowParallel(inner, hidden, mesh, bias)
        self.act = activation(act)

    def forward(self, h: Normed | Tensor) -> Partial:
        return self.down_proj(activate(self.up_proj(h), self.act))
