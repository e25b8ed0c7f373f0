"""Models that take images, on a GPU: logits are those of the CPU, as near as the dtype has them."""

import pytest
import torch

from ....devices import require_gpu
from .seeing import SEEING, SIZES, picture, seen_logits, write_seeing

require_gpu()


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("dtype, far", [("f32", 0.01), ("bf16", 0.1)])
def test_logits(tmp_path, name, dtype, far):
    path, images = write_seeing(tmp_path, name), [picture(*size, seed) for seed, size in enumerate(SIZES[:3])]
    _, want = seen_logits(path, images)
    _, got = seen_logits(path, images, device="cuda", dtype=dtype)
    distance = (got.float().cpu() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert torch.isfinite(got).all() and distance < far
