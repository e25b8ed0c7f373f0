"""Weights that a GPU encodes: with errors as those that CPUs encode have."""

import pytest
import torch
from phalanx.kernels.quantized.linear import dequantize
from phalanx.kernels.quantized.stack import stack

from . import codecs, search_cases
from .test_super_blocks import ERRORS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("size", [16, 32])
def test_scales(size):
    search_cases.check(search_cases.make(size).cuda())


@pytest.mark.parametrize("name", ERRORS)
def test_weights(name):
    codec = codecs.find(name)
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * 0.03

    def error(device):
        there = weight.to(device)
        return (dequantize(codec.pack(*codec.encode(there))).cpu() - weight).square().mean().sqrt()

    assert abs(error("cuda") / error("cpu") - 1) < 0.01


@pytest.mark.parametrize("outputs", [48, 40])
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0", "q5_0", "q4_0", "e4m3"])
def test_stacks(name, outputs):
    search_cases.check_stack(codecs.find(name), outputs, "cuda")


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q2_k", "q8_0", "q5_0", "q4_0", "e4m3"])
def test_stacks_for_the_host(name, at_once):
    codec = codecs.find(name)
    weights = torch.randn(3, 40, 512, device="cuda")

    def encoded(index, device):
        return [x.to(device) for x in codec.encode(weights[index * at_once :][:at_once].flatten(0, 1))]

    made = stack(codec, lambda index: encoded(index, "cuda"), weights.shape, at_once, in_host=True)
    want = stack(codec, lambda index: encoded(index, "cpu"), weights.shape, at_once)
    assert type(made.packed) is type(want.packed)
    for one, other in zip(made.tensors, want.tensors, strict=True):
        assert one.is_pinned() and torch.equal(one, other)
