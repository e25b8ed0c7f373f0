"""Triton's rotation in its interpreter, and compiled for every supported generation."""

import pytest
import torch

from ..interpreter import interpret
from ..test_compile import Recorder, compile_launch


def test_rotate():
    interpret("rope.rotating")


@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    "dtype, heads, dim", [(torch.bfloat16, 32, 80), (torch.float32, 3, 64), (torch.float16, 16, 36)]
)
def test_compiles(dtype, heads, dim, arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.rope import rope_triton

    kernel, launches = rope_triton.rotate_kernel, Recorder()
    monkeypatch.setattr(rope_triton, "rotate_kernel", launches)
    angles = torch.zeros(7, dim // 2)
    rope_triton.rotate(torch.zeros(7, heads, dim, dtype=dtype), angles, angles)
    assert compile_launch(kernel, *launches.found[0], arch).metadata.shared == 0
