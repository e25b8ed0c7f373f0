"""Activations have the same numbers and constants in Python, CUDA and C++; Triton takes Python's."""

import re
from pathlib import Path

import pytest
from phalanx import kernels
from phalanx.kernels.activation import activation

SOURCES = Path(kernels.__file__).parent
CUDA, CPP = ((SOURCES / name).read_text() for name in ("cuda/common.cuh", "cpp/activations.h"))


def constant(text, name):
    (value,) = re.findall(rf"constexpr (?:int|float) {name} = ([0-9.]+)f?[,;]", text)
    return float(value)


def test_cuda_has_the_kinds_in_their_order():
    (names,) = re.findall(r"enum \{ (SILU.*) \};", CUDA)
    assert tuple(names.lower().split(", ")) == activation.ACTIVATIONS
    assert constant(CUDA, "KIND_BITS") == activation.KIND_BITS
    assert len(activation.ACTIVATIONS) <= 1 << activation.KIND_BITS


@pytest.mark.parametrize("text", [CUDA, CPP], ids=["CUDA", "C++"])
def test_a_clamped_swiglu_has_the_same_constants(text):
    assert constant(text, "LIMIT_UNITS") == activation.LIMIT_UNITS
    assert constant(text, "SLOPE") == activation.SLOPE
