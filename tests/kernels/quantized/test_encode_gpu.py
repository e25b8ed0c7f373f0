"""Weights that a GPU encodes: with errors as those that CPUs encode have."""

import importlib

import pytest
import torch
from phalanx.kernels.quantized import scale_search

from . import search_cases
from .test_super_blocks import ERRORS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("size", [16, 32])
def test_scales(size):
    search_cases.check(scale_search, search_cases.make(size).cuda())


@pytest.mark.parametrize("name", ERRORS)
def test_weights(name):
    codec = importlib.import_module(f"phalanx.kernels.quantized.{name}")
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * 0.03

    def error(device):
        there = weight.to(device)
        return (codec.dequantize(codec.pack(*codec.encode(there))).cpu() - weight).square().mean().sqrt()

    assert abs(error("cuda") / error("cpu") - 1) < 0.01


@pytest.mark.parametrize("outputs", [48, 40])
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0", "q5_0", "q4_0", "e4m3"])
def test_stacks(name, outputs):
    search_cases.check_stack(importlib.import_module(f"phalanx.kernels.quantized.{name}"), outputs, "cuda")
