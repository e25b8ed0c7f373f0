"""Blocks of several tensors as rows: with torch, and the kernel thread by thread on a CPU."""

import itertools

import pytest
import torch
from phalanx.kernels.cache.block_rows import PAIR, THREADS, BlockRows

from .. import cuda_model

KINDS = {  # of a block: shapes and dtypes, and the widest unit
    "wide": ([(4, 2, 8), (4, 2, 4)], torch.bfloat16, torch.int64),
    "narrow": ([(4, 3), (1, 3)], torch.bfloat16, torch.int16),
    "codes": ([(4, 7), (2, 1, 4)], torch.uint8, torch.int32),
    "odd": ([(3, 5)], torch.uint8, torch.uint8),
    "long": ([(3, 4096), (16,), (16, 160)], torch.bfloat16, torch.int64),
}


def made(kind: str, blocks: int = 9) -> list[torch.Tensor]:
    shapes, dtype, _ = KINDS[kind]
    return [torch.randint(0, 100, (blocks, *shape)).to(dtype) for shape in shapes]


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_become_rows_and_come_back_elsewhere(kind):
    tensors = made(kind)
    before = [x.clone() for x in tensors]
    blocks = BlockRows(tensors)
    assert blocks.unit == KINDS[kind][2]
    rows = torch.empty(3, blocks.width, dtype=blocks.unit)
    blocks.gather(torch.tensor([7, 0, 4]), rows)
    assert torch.equal(rows.view(torch.uint8), torch.cat([bytes_of(x[[7, 0, 4]]) for x in tensors], 1))
    blocks.spread(rows, torch.tensor([1, 2, 8]))
    blocks.copy(torch.tensor([6, 3]), torch.tensor([5, 3]))
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(x, old[[0, 7, 0, 3, 4, 6, 6, 7, 4]])


@pytest.mark.parametrize("kind, access", [("wide", 16), ("narrow", 2), ("long", 16), ("long", 4)])
def test_the_kernel(kind, access, cuda_models):
    tensors = made(kind)
    sizes = [bytes_of(x).shape[1] for x in tensors]
    before = torch.cat([bytes_of(x) for x in tensors], 1)
    begins = itertools.accumulate(sizes, initial=0)
    parts = [(x.data_ptr(), n // access, begin // access) for x, n, begin in zip(tensors, sizes, begins, strict=False)]
    rows = torch.full((3, sum(sizes)), 255, dtype=torch.uint8)

    def run(spread: int, ids: list[int], others: list[int] | None = None, pieces: int = 1) -> None:
        consts = dict(T=PAIR, V=access // PAIR.itemsize, THREADS=THREADS, SPREAD=spread, OTHERS=int(others is not None))
        args = torch.tensor(parts), rows, torch.tensor(ids), torch.tensor(others or ids), sum(sizes) // access
        library = cuda_models.build("block_rows", consts)
        cuda_model.launch(library, (len(ids), len(tensors), pieces), THREADS, args, rows)

    run(0, [7, 0, 4])
    assert torch.equal(rows, before[[7, 0, 4]])
    run(1, [1, 2, 8])
    run(0, [6, 3], [5, 3], pieces=3)
    for x, old in zip(tensors, before.split(sizes, 1), strict=True):
        assert torch.equal(bytes_of(x), old[[0, 7, 0, 3, 4, 6, 6, 7, 4]])
