"""Gated activations of feed-forward layers: act(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from .. import jit
from ..cpp import ops

THREADS = 128
# gelu_tanh: Hendrycks and Gimpel 2016, arXiv 1606.08415; relu2: So et al. 2021, arXiv 2109.08668. common.cuh has the
# same order.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")


def gated_activation(x: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up [T, I], where x [T, 2 I] is gate beside up; computed in f32. x may be overwritten."""
    if x.is_cuda:
        return gated_activation_cuda(x, activation)
    if x.is_contiguous() and ops.takes(x):
        return gated_cpu(activation, x)
    return gated_activation_reference(x, activation)


def gated_activation_reference(x: Tensor, activation: str) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate = gate.float()
    if activation == "silu":
        act = silu(gate)
    elif activation == "relu2":
        act = relu(gate).square_()
    else:
        act = gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return act.mul_(up).to(x.dtype)


def gated_cpu(name: str, x: Tensor) -> Tensor:
    """f(gate) * up of a contiguous x, where f is one of ACTIVATIONS."""
    y = x.new_empty(len(x), x.shape[1] // 2)
    ops.typed("activation", name, x.dtype)(x, y, *y.shape)
    return y


def gated_activation_cuda(x: Tensor, activation: str) -> Tensor:
    x = x.contiguous()
    width = x.shape[1] // 2
    out = x.new_empty(len(x), width)
    vector = jit.vector(x, width)
    kernel = jit.kernel("activation", "gated_activation", x.dtype, V=vector, ACT=ACTIVATIONS.index(activation))
    kernel((-(-width // (THREADS * vector)), len(x), 1), THREADS, x, out, width)
    return out
