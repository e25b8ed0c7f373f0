"""Matrices rounded by GPTQ: against rounding to the nearest code, and against what the outputs lose."""

import pytest
import torch
from phalanx.rank.convert import gptq
from phalanx.rank.convert.gptq import Scheme

SCHEMES = [
    Scheme(4, 32, True),
    Scheme(4, 32, False),
    Scheme(8, 64, True),
    Scheme(4, 0, False),
    Scheme(4, 32, True, ordered=True),
    Scheme(8, 160, False, ordered=True),
]


def inputs(count, size, seed=0, alike=0.9):
    """[count, size], neighbours of which are alike, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(count, size // 8, generator=generator).repeat_interleave(8, 1)
    sizes = torch.rand(size, generator=generator) + 0.2
    return (alike * common + torch.randn(count, size, generator=generator)) * sizes


def matrix(outputs, size, seed=1):
    return torch.randn(outputs, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_outputs_lose_less_than_by_the_nearest_codes(scheme):
    weight, x = matrix(48, 320), inputs(900, 320)
    hessian = x.t() @ x
    before = hessian.clone()
    rounded = gptq.quantize(weight, hessian, scheme)
    nearest = gptq.quantize(weight, torch.eye(320), scheme)
    assert torch.equal(hessian, before)
    mine, theirs = (gptq.relative_error(weight, one.weight(), hessian) for one in (rounded, nearest))
    assert mine < 0.85 * theirs
    assert mine == pytest.approx(
        float(((rounded.weight() - weight) @ x.t()).norm() / (weight @ x.t()).norm()), rel=0.01
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_scales_and_groups(scheme):
    weight = matrix(32, 320)
    rounded = gptq.quantize(weight, torch.eye(320), scheme)
    group = scheme.group_of(320)
    assert rounded.codes.dtype == torch.uint8 and int(rounded.codes.max()) <= scheme.most
    assert rounded.scales.shape == rounded.zeros.shape == (32, 320 // group)
    assert torch.equal(rounded.scales, rounded.scales.to(torch.float16).float())
    assert torch.equal(rounded.groups.bincount(), torch.full((320 // group,), group))
    if scheme.symmetric:
        assert (rounded.zeros == (scheme.most + 1) // 2).all()
    # Inputs that have nothing to do with each other: each weight is the nearest that its grid has, or at its end.
    step = rounded.scales[:, rounded.groups.long()]
    inside = (rounded.codes > 0) & (rounded.codes < scheme.most)
    assert ((rounded.weight() - weight).abs() <= 0.5001 * step)[inside].all() and inside.float().mean() > 0.6


def test_inputs_that_are_always_zero_cost_nothing():
    weight, x = matrix(16, 64), inputs(300, 64)
    x[:, 10:20] = 0
    rounded = gptq.quantize(weight, x.t() @ x, Scheme(4, 32, False))
    assert (rounded.weight()[:, 10:20] == 0).all() and weight[:, 10:20].all()
    assert gptq.relative_error(weight, rounded.weight(), x.t() @ x) < 0.1


def test_a_matrix_of_zeros():
    rounded = gptq.quantize(torch.zeros(16, 64), torch.eye(64), Scheme(4, 32, True))
    assert (rounded.weight() == 0).all() and (rounded.scales > 0).all()


def test_inputs_that_are_infinite():
    with pytest.raises(ValueError, match="infinite"):
        gptq.quantize(matrix(16, 64), torch.full((64, 64), float("inf")), Scheme(4, 32, True))
