"""However a step is computed, its sampled rows are those of the plain way, within f32's rounding."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank.model.layers.norm import PostNorm
from phalanx.rank.model.load import load
from phalanx.rank.worker import batch_builder as module
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.state import BatchState, ScheduledBatch
from phalanx.rank.worker.upload import Upload

from ...checkpoints import ARCHITECTURES
from .harness import BLOCK, distance, nan_caches, tokens
from .test_architectures import write

TOLERANCE = 1e-5
PROMPTS = [30, 7, 41, 2, 1, 19]  # tokens of each sequence's prompt
# Steps of (sequence, tokens), single ones first: a chunk alone, none of whose rows is sampled; chunks in the middle
# beside prompts that end; decodes beside both; decodes alone.
STEPS = [
    [(0, 9)],
    [(1, 7), (0, 12)],
    [(4, 1), (1, 1), (0, 9), (3, 2), (2, 23)],
    [(1, 1), (4, 1), (3, 1), (2, 18), (5, 5)],
    [(5, 1), (1, 1)],
    [(1, 1), (4, 1), (5, 13)],
    [(1, 1), (3, 1), (4, 1), (2, 1), (5, 1)],
]


class Early:
    """Async all-reduces are made as they begin; no other collective comes between: comm/base.py."""

    def __init__(self, comm):
        self.comm, self.under_way, self.count = comm, [], 0

    def __getattr__(self, name):
        found = getattr(self.comm, name)
        assert not self.under_way or not callable(found), name
        return found

    def all_reduce_async(self, x, epilogue=None):
        self.count += 1
        if epilogue and self.count % 2:  # as dma_allreduce.py does: the norm adds what the others have
            result = epilogue(self.comm.all_reduce(x.clone()) - x)
        else:
            self.comm.all_reduce(x)
            result = epilogue(None) if epilogue else x
        self.under_way.append(Work(self, result))
        return self.under_way[-1]


class Work:
    def __init__(self, group, result):
        self.group, self.result = group, result
        self.copies = [y.clone() for y in (result if isinstance(result, tuple) else [result])]

    def wait(self):
        assert self.group.under_way.pop(0) is self
        results = self.result if isinstance(self.result, tuple) else [self.result]
        assert all(map(torch.equal, results, self.copies))  # somebody has touched what it made
        return self.result


def compute(comm, path, tp, pp, narrow, early=False, **options):
    """For each step the stream's rows [S, hidden] that are sampled, on the last stage. Caches begin as NaN."""
    torch.set_grad_enabled(False)
    grid = mesh.build(comm, tp, pp)
    if early:
        grid = dataclasses.replace(grid, tensor=Early(grid.tensor))
    model = load(path, grid)
    width = 16
    rows = BatchState(len(PROMPTS), width * BLOCK, BLOCK)
    rows.table[:] = np.random.default_rng(0).permutation(rows.table.size).reshape(rows.table.shape)
    ids = [tokens(width * BLOCK, seed) for seed in range(len(PROMPTS))]
    for row, count in enumerate(PROMPTS):
        rows.tokens[row], rows.known[row] = np.array(ids[row][:count]), count
    caches = nan_caches(model, rows.table.size)
    found, parts = [], []
    for step in STEPS:
        members, counts = (np.array(part) for part in zip(*step, strict=True))
        starts = rows.computed[members]
        rows.computed[members] += counts
        samples = rows.computed[members] >= rows.known[members]
        last = torch.tensor([[ids[row][min(start, 63)]] for row, start in enumerate(rows.computed - 1)])
        work = ScheduledBatch(members, starts, counts, samples, np.zeros(len(members), np.int64))
        narrowed = narrow and grid.last
        batches, sampled = build_batches(rows, work, last, caches, Upload(last.device), narrowed, **options)
        parts.append(len(batches))
        assert sampled.tolist() == members[samples].tolist()
        hidden = None
        if not grid.first:
            hidden = grid.pipe.recv(torch.empty(counts.sum(), model.hidden_size), grid.pipe.rank - 1)
        hidden = model(batches, hidden)
        if grid.last:
            found.append(hidden if narrowed else hidden[(np.cumsum(counts) - 1)[samples]])
            assert len(found[-1]) == samples.sum() and len(hidden) == (samples.sum() if narrowed else counts.sum())
        else:
            assert len(hidden) == counts.sum()
            grid.pipe.send(hidden, grid.pipe.rank + 1)
    if early:  # a sum that a post-norm reads is made before it
        assert (grid.tensor.count > 0) is not any(isinstance(part, PostNorm) for part in model.modules())
        assert not grid.tensor.under_way
    # Steps in which a prompt's single token comes first stay whole.
    assert parts == ([2, 2, 1, 2, 1, 2, 2] if options.get("min_tokens") else [1] * len(STEPS))
    return found


def sampled_rows(path, tp=1, pp=1, narrow=False, **options):
    return threads.run(lambda comm: compute(comm, path, tp, pp, narrow, **options), tp * pp)[0]


MODELS = {
    "llama": dict(model_type="llama", num_hidden_layers=2),
    "one layer": dict(model_type="llama", num_hidden_layers=1),
    "biased": dict(model_type="llama", num_hidden_layers=2, attention_bias=True, mlp_bias=True),
    "qwen3": dict(
        model_type="qwen3", num_hidden_layers=2, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
}
# Norms after sublayers, with norms before them and without.
POST_NORMED = {
    "gemma2": dict(model_type="gemma2", num_hidden_layers=2, head_dim=16, sliding_window=5),
    "olmo2": dict(model_type="olmo2", num_hidden_layers=2),
}
MODELS |= POST_NORMED


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """name -> its checkpoint."""

    def make(name):
        options = MODELS[name]
        if options["model_type"] in ARCHITECTURES:
            return checkpoint(**options)
        return write(tmp_path_factory.mktemp(name), **options)

    return functools.cache(make)


@pytest.mark.sample(5)
@pytest.mark.parametrize("threads_of_torch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_the_last_layer_goes_on_with_the_sampled_rows(made, name, threads_of_torch):
    torch.set_num_threads(threads_of_torch)
    path = made(name)
    try:
        for plain, narrowed in zip(sampled_rows(path), sampled_rows(path, narrow=True), strict=True):
            assert len(plain) == 0 or distance(plain, narrowed) < TOLERANCE * plain.abs().max()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2), (2, 2)])
def test_on_several_ranks(checkpoint, tp, pp):
    path = checkpoint(num_hidden_layers=3)
    for plain, narrowed in zip(sampled_rows(path), sampled_rows(path, tp, pp, narrow=True), strict=True):
        assert len(plain) == 0 or distance(plain, narrowed) < TOLERANCE * plain.abs().max()


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp, pp, narrow", [(1, 1, True), (2, 1, False), (2, 1, True), (2, 2, True)])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_may_be_cut(made, monkeypatch, name, tp, pp, narrow):
    monkeypatch.setattr(module, "TILE", 4)
    path = made(name)
    if pp > MODELS[name]["num_hidden_layers"]:
        pytest.skip("more stages than layers")
    for plain, cut in zip(sampled_rows(path), sampled_rows(path, tp, pp, narrow, min_tokens=1), strict=True):
        assert len(plain) == 0 or distance(plain, cut) < TOLERANCE * plain.abs().max()


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", ["llama", *POST_NORMED])
def test_what_begins_a_sum_leaves_it_alone_until_it_has_ended(made, monkeypatch, name, narrow):
    monkeypatch.setattr(module, "TILE", 4)
    plain, early = (sampled_rows(made(name), 2, 1, narrow, early=early, min_tokens=1) for early in (False, True))
    assert all(map(torch.equal, plain, early))
