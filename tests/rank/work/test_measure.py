"""What the largest step is measured by looks as prepare() makes steps."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import torch
from phalanx.rank.model.base import KVSpec
from phalanx.rank.work import measure
from phalanx.rank.work.prepare import prepare
from phalanx.rank.work.rows import Rows, Work
from phalanx.rank.work.upload import Upload

BLOCK = 16
CPU = torch.device("cpu")


def model(longest):
    return SimpleNamespace(max_model_len=longest, kv_spec=KVSpec(3, 2, 8), dtype=torch.bfloat16)


def prepared(*counts, sampled=0, narrow=False):
    """A step of whole prompts of so many tokens, all in the same blocks; the first `sampled` of them sample."""
    rows = Rows(len(counts), max(counts), BLOCK)
    rows.table[:] = np.arange(rows.table.shape[1])
    rows.tokens, rows.known[:] = [np.zeros(count, np.int64) for count in counts], counts
    zeros = np.zeros(len(counts), np.int64)
    work = Work(np.arange(len(counts)), zeros, np.array(counts), np.arange(len(counts)) < sampled, zeros)
    (batch,), _ = prepare(rows, work, torch.zeros(len(counts), dtype=torch.int64), [], BLOCK, Upload(CPU), narrow)
    return batch


def same(found, want):
    for field in dataclasses.fields(want):
        a, b = getattr(found, field.name), getattr(want, field.name)
        if field.name == "sampled" and b is not None:
            same(a, b)
        elif field.name != "caches":
            assert (torch.equal(a, b) and a.dtype == b.dtype) if isinstance(b, torch.Tensor) else a == b, field.name


def test_the_largest_step():
    same(measure._prompts(model(24), 64, BLOCK, CPU), prepared(24, 24, 16))
    same(measure._prompts(model(100), 50, BLOCK, CPU), prepared(50))
    caches = measure._prompts(model(24), 64, BLOCK, CPU).caches
    assert [[x.shape for x in pair] for pair in caches] == [[(2, BLOCK, 2, 8)] * 2] * 3


def test_the_narrowed_step():
    same(measure._narrowed(measure._prompts(model(24), 2, BLOCK, CPU), 2), prepared(2, sampled=1, narrow=True))
