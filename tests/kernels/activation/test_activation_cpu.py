import pytest
import torch
from phalanx.kernels.activation.activation import (
    ACTIVATIONS,
    CLAMPED,
    CLAMPED_SILU,
    CLAMPED_SWIGLU,
    PLAIN,
    SILU_CLAMPED,
    act_number,
    activate,
    clamped,
    gated_activation,
    gated_activation_reference,
    gated_cpu,
    product,
    scale_by_sigmoid,
    sigmoid_gate,
)
from torch.nn.functional import gelu, relu, silu

from ..conftest import DTYPES, SUFFIXES, close

FUNCTIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu2": lambda x: relu(x).square(),
}


def clamp(gate, up, limit=7.0):
    """The gate of transformers' GptOssExperts._apply_gate."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def clamp_silu(gate, up, limit=7.0):
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def silu_clamped(gate, up, limit=7.0):
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


GATED = {name: lambda gate, up, act=act: act(gate) * up for name, act in FUNCTIONS.items()}
GATED["clamped_swiglu"] = clamp
GATED["clamped_silu"] = clamp_silu
GATED["silu_clamped"] = silu_clamped
LIMITED = {
    clamped(CLAMPED_SWIGLU, 2.5): lambda gate, up: clamp(gate, up, 2.5),
    clamped(CLAMPED_SILU, 2.5): lambda gate, up: clamp_silu(gate, up, 2.5),
    clamped(SILU_CLAMPED, 2.5): lambda gate, up: silu_clamped(gate, up, 2.5),
}


def test_each_activation_is_here():
    assert tuple(FUNCTIONS) == PLAIN and tuple(GATED) == ACTIVATIONS


def test_limits():
    assert clamped(CLAMPED_SWIGLU, 7.0) == "clamped_swiglu"
    assert act_number(clamped(CLAMPED_SWIGLU, 2.5)) == 4 | 2560 << 4 and act_number("relu2") == 3
    assert act_number("clamped_swiglu") == 4 | 7168 << 4
    for wrong in (0, -1.0, 1e6, 0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="1/1024"):
            clamped(CLAMPED_SWIGLU, wrong)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*GATED, *LIMITED])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 33), (16, 64), (2, 100)])
def test_gated(isa, threads, called, dtype, name, rows, width):
    x = (torch.randn(rows, 2 * width) * 6).to(dtype)
    x[0, 0], x[-1, width - 1] = 200, -200
    gate, up = x.float().chunk(2, -1)
    want = (GATED | LIMITED)[name](gate, up)
    close(gated_cpu(name, x), want, dtype, atol=1e-5)
    assert len(called) == 1
    close(gated_activation_reference(x, name), want, dtype, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rows, width", [(0, 5), (1, 1), (3, 33), (16, 64)])
def test_activate(isa, threads, called, dtype, name, rows, width):
    x = (torch.randn(rows, width) * 6).to(dtype)
    want = FUNCTIONS[name](x.float())
    close(activate(x, name), want, dtype)
    assert called == [f"{name}_{SUFFIXES[dtype]}"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 33), (16, 64)])
def test_sigmoid_gate(isa, threads, called, dtype, shape):
    x, gate = (torch.randn(2, *shape) * 6).to(dtype)
    want = x.float() * gate.float().sigmoid()
    close(sigmoid_gate(x, gate), want, dtype)
    assert called == [f"sigmoid_gate_{SUFFIXES[dtype]}"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(0, 5), (1, 1), (3, 33), (16, 64)])
def test_product(isa, threads, called, dtype, rows, width):
    """Parts of wider rows."""
    x, other = torch.randn(rows, 2 * width + 3).to(dtype)[:, : 2 * width].chunk(2, 1)
    close(product(x, other), x.float() * other.float(), dtype)
    assert called == [f"product_{SUFFIXES[dtype]}"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 33), (16, 64)])
def test_scale_by_sigmoid(isa, threads, called, dtype, rows, width):
    x, gate = (torch.randn(rows, width) * 6).to(dtype), (torch.randn(rows, 1) * 6).to(dtype)
    want = x.float() * gate.float().sigmoid()
    by_torch = scale_by_sigmoid(x.t().clone().t(), gate)
    close(scale_by_sigmoid(x, gate), want, dtype)
    close(by_torch, want, dtype)


def test_activate_by_torch(called):
    x = torch.randn(3, 10).half()
    close(activate(x.clone(), "gelu_tanh"), gelu(x.float(), approximate="tanh"), torch.float16, 1e-3, 1e-3)
    close(activate(torch.ones(2, 10)[:, ::2], "relu2"), torch.ones(2, 5), torch.float32)
    assert called == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_not_finite_stays_so(isa, name):
    x = torch.ones(3, 2 * 20)
    x[1, 3], x[2, 19] = float("nan"), float("inf")
    y = gated_cpu(name, x)
    assert y[0].isfinite().all()
    assert y[1, 3].isnan() and y[1].isfinite().sum() == 19 and y[2, 19] == float("inf")


@pytest.mark.parametrize("name", CLAMPED)
def test_clamps(isa, name):
    x = torch.tensor([[9.0, -9.0, 1.0, 1.0, float("nan"), 1.0, 30.0, -30.0, 9.0, -9.0, 1.0, float("nan")]])
    gate, up = x.chunk(2, -1)
    y = gated_cpu(name, x.clone())
    close(y[:, :4], GATED[name](gate, up)[:, :4], torch.float32, atol=1e-5)
    assert y[0, 4:].isnan().all()


def test_gated_activation(called):
    x = torch.randn(3, 10)
    close(gated_activation(x), silu(x[:, :5]) * x[:, 5:], torch.float32)
    assert called == ["gated_silu_f32"] and gated_activation(torch.randn(3, 10)[:, :8]).shape == (3, 4)
