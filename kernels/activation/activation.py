"""Activations of feed-forward layers, plain, and gated: act(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor, sigmoid
from torch.nn.functional import gelu, relu, silu

from .. import jit
from ..cpp import ops

THREADS = 128
# gelu_tanh: Hendrycks and Gimpel 2016, arXiv 1606.08415; relu2: So et al. 2021, arXiv 2109.08668. common.cuh has
# the same order.
PLAIN = ("silu", "gelu", "gelu_tanh", "relu2")
# gpt-oss (OpenAI 2025, arXiv 2508.10925): sigmoid(SLOPE * gate) * gate * (up + 1), where both are clamped first: gate
# from above, up on both sides. Gated alone. With another limit than LIMIT its name goes on with @ and that limit.
CLAMPED_SWIGLU = "clamped_swiglu"
CLAMPED_SILU = "clamped_silu"  # silu(gate) * up, where both are clamped so, as in DeepSeek-V4
SILU_CLAMPED = "silu_clamped"  # the same, but that silu(gate) is clamped, as in Step 3.5
CLAMPED = CLAMPED_SWIGLU, CLAMPED_SILU, SILU_CLAMPED
LIMIT, SLOPE = 7.0, 1.702
ACTIVATIONS = (*PLAIN, *CLAMPED)
LIMIT_UNITS = 1024  # kernels get a limit in these parts of 1, as an integer, ...
MAX_LIMIT = 1 << 16  # ... which lies above the activation's four bits in an int of 32
KIND_BITS = 4
XIELU_BETA = 0.5  # xIELU's slope at zero


def clamped(kind: str, limit: float) -> str:
    """The name of one of CLAMPED with this limit. Raises ValueError where kernels cannot take it."""
    if not 0 < limit <= MAX_LIMIT or limit * LIMIT_UNITS % 1:
        raise ValueError(f"it must be a multiple of 1/{LIMIT_UNITS} above 0, at most {MAX_LIMIT}")
    return kind if limit == LIMIT else f"{kind}@{limit}"


def kind(act: str) -> str:
    """Which of ACTIVATIONS it is."""
    return act.partition("@")[0]


def limit_units(act: str) -> int:
    """Its limit in 1 / LIMIT_UNITS; 0 where it has none."""
    if kind(act) not in CLAMPED:
        return 0
    return int(float(act.partition("@")[2] or LIMIT) * LIMIT_UNITS)


def act_number(act: str) -> int:
    """ACT, a constant of GPU kernels: the kind of activation, and above its bits the limit."""
    return ACTIVATIONS.index(kind(act)) | limit_units(act) << KIND_BITS


def gate_sizes(act: str) -> dict[str, int]:
    """Compile-time constants of a GEMM's kernel. act: of the first half of its outputs, the gate; "": there is none."""
    return dict(GATED=int(bool(act)), ACT=act_number(act) if act else 0)


def gated_activation(x: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up [T, I], where x [T, 2 I] is gate before up; computed in f32. x may be overwritten."""
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
        operation, values = activate_call(activation, x)
        operation(*values)
        return x
    return activate_reference(x, activation)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), of one shape."""
    if x.is_contiguous() and gate.is_contiguous() and x.dtype == gate.dtype and ops.takes(x):
        y = x.new_empty(x.shape)
        ops.typed("activation", "sigmoid_gate", x.dtype)(x, gate, y, x.numel())
        return y
    return x * gate.sigmoid()


def product(x: Tensor, other: Tensor) -> Tensor:
    """x * other, of one shape [T, I], which may be parts of wider rows."""
    if x.stride(1) == other.stride(1) == 1 and x.dtype == other.dtype and ops.takes(x):
        y = x.new_empty(x.shape)
        ops.typed("activation", "product", x.dtype)(x, other, y, *x.shape, x.stride(0), other.stride(0))
        return y
    return x * other


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
    if limit := limit_units(activation) / LIMIT_UNITS:
        gate, up = gate.float(), up.float().clamp(-limit, limit)
        if kind(activation) == SILU_CLAMPED:
            return silu(gate).clamp_(max=limit).mul_(up).to(x.dtype)
        gate = gate.clamp(max=limit)
        if kind(activation) == CLAMPED_SILU:
            return silu(gate).mul_(up).to(x.dtype)
        return (sigmoid(gate * SLOPE) * gate).mul_(up + 1).to(x.dtype)
    return _act(gate.float(), activation).mul_(up).to(x.dtype)


def _act(x: Tensor, activation: str) -> Tensor:
    """A new tensor; x is f32."""
    if activation == "silu":
        return silu(x)
    if activation == "relu2":
        return relu(x).square_()
    return gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_cpu(act: str, x: Tensor) -> Tensor:
    """x: contiguous."""
    y = x.new_empty(len(x), x.shape[1] // 2)
    operation, values = gated_call(act, x, y)
    operation(*values)
    return y


def gated_call(act: str, x: Tensor, y: Tensor) -> tuple[ops.Op, tuple[ops.Value, ...]]:
    """The operation that makes y [T, I] of x [T, 2 I], both contiguous."""
    return ops.typed("activation", f"gated_{kind(act)}", x.dtype), (x, y, *y.shape, limit_units(act))


def activate_call(act: str, x: Tensor) -> tuple[ops.Op, tuple[ops.Value, ...]]:
    """The operation that makes act(x) of x, contiguous, in its place."""
    return ops.typed("activation", act, x.dtype), (x, x, x.numel())


def activate_cuda(x: Tensor, activation: str) -> Tensor:
    x = x.contiguous()
    vector = jit.vector(x, x.numel())
    kernel = jit.kernel("activation", "activation", x.dtype, V=vector, ACT=act_number(activation))
    count = x.numel() // vector
    kernel((-(-count // THREADS), 1, 1), THREADS, x, x, count)
    return x


def gated_activation_cuda(x: Tensor, activation: str) -> Tensor:
    x = x.contiguous()
    width = x.shape[1] // 2
    rows = x.shape[0]
    out = x.new_empty(rows, width)
    vector = jit.vector(x, width)
    kernel = jit.kernel("activation", "gated_activation", x.dtype, V=vector, ACT=act_number(activation))
    kernel((-(-width // (THREADS * vector)), rows, 1), THREADS, x, out, width)
    return out


def scale_by_gate(x: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """`scale_by_sigmoid` on GPUs, where gate is h [T, H] times the transpose of the weight [1, H], in one kernel: all
    contiguous and of one dtype."""
    assert all(one.is_contiguous() and one.dtype == x.dtype for one in (x, h, weight))
    (rows, width), size = x.shape, h.shape[1]
    vector = jit.common_vector((x, h, weight), size, width)
    sizes = dict(N=size, WIDTH=width, V=vector, THREADS=min(max(-(-size // vector // 32) * 32, 32), 256))
    kernel = jit.kernel("scale_by_gate", "scale_by_gate", x.dtype, **sizes)
    kernel((rows, 1, 1), sizes["THREADS"], x, h, weight)
    return x


def xielu(x: Tensor, positive: float, negative: float) -> Tensor:
    """positive x^2 + XIELU_BETA x where x > 0, else negative (e^x - 1 - x) + XIELU_BETA x (Huang and Schlag 2024, arXiv
    2411.13010); in f32. x may be overwritten."""
    if x.is_cuda:
        x = x.contiguous()
        vector = jit.vector(x, x.numel())
        count = x.numel() // vector
        kernel = jit.kernel("xielu", "xielu", x.dtype, V=vector)
        kernel((-(-count // THREADS), 1, 1), THREADS, x, count, positive, negative, XIELU_BETA)
        return x
    if x.is_contiguous() and ops.takes(x):
        ops.typed("xielu", "xielu", x.dtype)(x, x.numel(), positive, negative, XIELU_BETA)
        return x
    return xielu_reference(x, positive, negative)


def xielu_reference(x: Tensor, positive: float, negative: float) -> Tensor:
    wide = x.float()
    curve = torch.where(wide > 0, positive * wide.square(), negative * (wide.clamp(max=0).expm1() - wide))
    return curve.add_(wide, alpha=XIELU_BETA).to(x.dtype)
