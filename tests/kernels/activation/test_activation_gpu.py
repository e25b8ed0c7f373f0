"""Activations on a GPU against their torch references."""

import pytest
import torch
from phalanx.kernels.activation import activation

from ...devices import require_gpu
from ..gpu import KINDS, near, poison  # noqa: F401

require_gpu()


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, size", [(0, 8), (1, 1), (3, 33), (17, 64), (4, 14336), (3, 1020)])
@pytest.mark.parametrize("act", activation.PLAIN)
def test_activate(rows, size, dtype, bound, act):
    x = (torch.randn(rows, size, device="cuda") * 3).to(dtype)
    near(activation.activate(x.clone(), act), activation.activate_reference(x, act), bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, size", [(0, 8), (1, 1), (3, 33), (37, 4096)])
def test_xielu(rows, size, dtype, bound):
    x = (torch.randn(rows, size, device="cuda") * 3).to(dtype)
    near(activation.xielu(x.clone(), 0.9, 1.3), activation.xielu_reference(x, 0.9, 1.3), bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, size", [(0, 8), (1, 1), (3, 33), (17, 64), (4, 14336), (3, 1020)])
@pytest.mark.parametrize("act", [*activation.ACTIVATIONS, activation.clamped(activation.CLAMPED_SWIGLU, 0.5)])
def test_gated_activation(rows, size, dtype, bound, act):
    x = (torch.randn(rows, 2 * size, device="cuda") * 3).to(dtype)
    near(activation.gated_activation(x, act), activation.gated_activation_reference(x, act), bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, width, hidden", [(0, 8, 8), (1, 512, 2048), (3, 33, 65), (37, 20480, 3584)])
def test_scale_by_gate(rows, width, hidden, dtype, bound):
    x, h = ((torch.randn(rows, n, device="cuda")).to(dtype) for n in (width, hidden))
    weight = (torch.randn(1, hidden, device="cuda") / hidden**0.5).to(dtype)
    want = activation.scale_by_sigmoid(x.clone(), torch.nn.functional.linear(h, weight))
    near(activation.scale_by_gate(x, h, weight), want, bound)
