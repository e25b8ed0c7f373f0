"""Copies of entries of many tensors. Triton's kernel runs in the interpreter with the others (steps.py)."""

import pytest
import torch
from phalanx.kernels.recurrent.copy_entries import EntryCopies

from ..test_compile import Recorder, compile_launch


def test_entries_are_copied_in_each_tensor():
    tensors = [torch.randn(5, 3), torch.randn(5, 2, 4)]
    before = [x.clone() for x in tensors]
    EntryCopies(tensors).copy(torch.tensor([3, 0]), torch.tensor([1, 4]))
    for now, then in zip(tensors, before, strict=True):
        assert torch.equal(now, then[[0, 3, 2, 3, 0]])


@pytest.mark.parametrize("arch", [90, *(pytest.param(other, marks=pytest.mark.long) for other in (80, 100))])
def test_compiles(arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.recurrent import copy_entries_triton

    kernel, launches = copy_entries_triton.copy_kernel, Recorder()
    monkeypatch.setattr(copy_entries_triton, "copy_kernel", launches)
    numbers = torch.zeros(3, dtype=torch.int64)
    copy_entries_triton.copy_entries(numbers, numbers, numbers, numbers, 1 << 20)
    assert compile_launch(kernel, *launches.found[0], arch).metadata.shared == 0
