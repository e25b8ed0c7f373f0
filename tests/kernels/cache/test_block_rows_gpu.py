"""Blocks of several tensors as rows, by the kernel."""

import pytest
import torch
from phalanx.kernels.cache.block_rows import BlockRows

from ...devices import require_gpu
from .test_block_rows import KINDS, bytes_of, made

require_gpu()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_become_rows_and_come_back_elsewhere(kind):
    tensors = [x.cuda() for x in made(kind, 300)]
    before = [x.clone() for x in tensors]
    blocks = BlockRows(tensors)
    assert blocks.by_kernel == (kind != "odd")
    some, others = torch.randperm(300, device="cuda").split(150)
    rows = torch.empty(150, blocks.width, dtype=blocks.unit, device="cuda")
    blocks.gather(some, rows)
    assert torch.equal(rows.view(torch.uint8), torch.cat([bytes_of(x[some]) for x in tensors], 1))
    blocks.spread(rows, others)
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(x[some], old[some]) and torch.equal(x[others], old[some])
    blocks.copy(some[:70], some[80:])
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(x[some[80:]], old[some[:70]]) and torch.equal(x[some[:80]], old[some[:80]])
