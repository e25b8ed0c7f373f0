"""Copies of entries of many tensors on a GPU, by Triton's kernel."""

import pytest
import torch

from .steps import check_copies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_entries_are_copied_in_each_tensor():
    check_copies("cuda")
