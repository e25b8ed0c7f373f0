"""Activations of feed-forward layers, plain, and gated: act(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor, sigmoid
from torch.nn.functional import gelu, relu, silu

from .. import jit
from ..cpp import ops

THREADS = 128
# gelu_tanh: Hendrycks and Gimpel 2016, arXiv 1606.08415; relu2: So et al. 2021, arXiv 2109.08668. common.cuh has
# the same order.
PLAIN = ("silu", "gelu", "gelu_tanh", "relu2")
# gpt-oss (OpenAI 2025, arXiv 2508.10925): sigmoid(SLOPE * gate) * gate * (up + 1), where both are clamped first: gate
# from above, up on both sides. Gated alone.
CLAMPED_SWIGLU = "clamped_swiglu"
LIMIT, SLOPE = 7.0, 1.702
ACTIVATIONS = (*PLAIN, CLAMPED_SWIGLU)


def gate_sizes(act: str) -> dict[str, int]:
    """What a GEMM's kernel is compiled for. act: of the first half of its outputs, the gate; "": there is none."""
    return dict(GATED=int(bool(act)), ACT=ACTIVATIONS.index(act) if act else 0)


def gated_activation(x: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up [T, I], where x [T, 2 I] is gate beside up; computed in f32. x may be overwritten."""
    if x.is_cuda:
        return gated_activation_cuda(x, activation)
    if x.is_contiguous() and ops.takes(x):
        return gated_cpu(activation, x)
    return gated_activation_reference(x, activation)


def activate(x: Tensor, activation: str) -> Tensor:
    """act(x) [T, I], of PLAIN; computed in f32. x may be overwritten."""
    if x.is_cuda:
        return activate_cuda(x, activation)
    if x.is_contiguous() and ops.takes(x):
        ops.typed("activation", activation, x.dtype)(x, x, x.numel())
        return x
    return activate_reference(x, activation)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), of one shape."""
    if x.is_contiguous() and gate.is_contiguous() and x.dtype == gate.dtype and ops.takes(x):
        y = x.new_empty(x.shape)
        ops.typed("activation", "sigmoid_gate", x.dtype)(x, gate, y, x.numel())
        return y
    return x * gate.sigmoid()


def scale_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, I] times sigmoid(gate [T, 1]), computed in f32. x may be overwritten."""
    if x.is_contiguous() and gate.is_contiguous() and x.dtype == gate.dtype and ops.takes(x):
        ops.typed("activation", "scale_by_sigmoid", x.dtype)(x, gate, *x.shape)
        return x
    return x.mul_(gate.float().sigmoid())


def activate_reference(x: Tensor, activation: str) -> Tensor:
    return _act(x.float(), activation).to(x.dtype)


def gated_activation_reference(x: Tensor, activation: str) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    if activation == CLAMPED_SWIGLU:
        gate = gate.float().clamp(max=LIMIT)
        return (sigmoid(gate * SLOPE) * gate).mul_(up.float().clamp(-LIMIT, LIMIT) + 1).to(x.dtype)
    return _act(gate.float(), activation).mul_(up).to(x.dtype)


def _act(x: Tensor, activation: str) -> Tensor:
    """A new tensor; x is f32."""
    if activation == "silu":
        return silu(x)
    if activation == "relu2":
        return relu(x).square_()
    return gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_cpu(name: str, x: Tensor) -> Tensor:
    """x: contiguous."""
    y = x.new_empty(len(x), x.shape[1] // 2)
    ops.typed("activation", f"gated_{name}", x.dtype)(x, y, *y.shape)
    return y


def activate_cuda(x: Tensor, activation: str) -> Tensor:
    x = x.contiguous()
    vector = jit.vector(x, x.numel())
    kernel = jit.kernel("activation", "activation", x.dtype, V=vector, ACT=ACTIVATIONS.index(activation))
    count = x.numel() // vector
    kernel((-(-count // THREADS), 1, 1), THREADS, x, x, count)
    return x


def gated_activation_cuda(x: Tensor, activation: str) -> Tensor:
    x = x.contiguous()
    width = x.shape[1] // 2
    rows = x.shape[0]
    out = x.new_empty(rows, width)
    vector = jit.vector(x, width)
    kernel = jit.kernel("activation", "gated_activation", x.dtype, V=vector, ACT=ACTIVATIONS.index(activation))
    kernel((-(-width // (THREADS * vector)), rows, 1), THREADS, x, out, width)
    return out
