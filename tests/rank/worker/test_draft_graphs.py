"""Drafts behind captured steps are those behind eager ones; without a GPU, functions stand for what is captured."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank.model.batch import Batch, StepArrays
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.decode_batch import HostDecodeBatch
from phalanx.rank.worker.draft_graphs import DraftGraphs
from phalanx.rank.worker.upload import Upload

from .test_drafting import GREEDY, LENGTH, NAMES, SAMPLED, STEPS, Rank, made

SIZE = 3  # sequences of a captured step: attention's reference on CPUs knows none that only fill it up
CASES = [[GREEDY] * 3, [GREEDY, SAMPLED, GREEDY]]
__all__ = ["made"]  # a fixture


class Target:
    """Stands for DecodeGraphs of a rank: computes eagerly what it replays."""

    steps = [(SIZE, 1), (SIZE, 3)]

    def __init__(self, rank):
        self.rank, self.hidden = rank, {}
        self.inputs = {n: HostDecodeBatch(rank.state, rank.last, rank.caches, SIZE, n) for _, n in self.steps}

    def captured_step(self, size, query_len):
        return self.inputs[query_len].batch(size, [LENGTH] * size), self.hidden[query_len]

    def supports(self, scheduled):
        return len(scheduled.rows) == SIZE and scheduled.all_decode

    def replay(self, scheduled):
        (batch,), _ = build_batches(self.rank.state, scheduled, self.rank.last, self.rank.caches, self.rank.upload)
        state, inputs = self.rank.state, self.inputs[scheduled.query_len]
        inputs.fill(scheduled)
        for group, one in enumerate(inputs.inputs):
            one.tables.copy_(torch.from_numpy(state.table[state.rows_of(scheduled.rows, group)]))
        self.kept, self.hidden[scheduled.query_len] = batch, self.rank.model.forward([batch])
        return self.hidden[scheduled.query_len], batch.rows

    def batch(self, scheduled):
        return self.kept


class Called:
    def __init__(self, function):
        self.replay = lambda tokens: function()


def drafted(rank):
    """The drafts of each step, and the numbers that the draft model keeps of them."""
    found = [rank.step(**step) for step in STEPS]
    assert [len(one or {}) for one in found] == [1, 1, 2, 3, 3, 3]
    return found, [x.nan_to_num() for layer in rank.drafting.caches for x in layer]


def check(eager, captured):
    assert captured[0] == eager[0]
    for one, other in zip(captured[1], eager[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES[1:])  # latent attention on CPUs reads lengths on the host
@pytest.mark.parametrize("sampling", CASES, ids=["greedy", "mixed"])
def test_captured_drafts_are_those_of_eager_steps(made, name, sampling, monkeypatch):
    monkeypatch.setattr(DraftGraphs, "_capture", lambda self, run: Called(run))
    path, wanted = made(name)

    def work(comm):
        eager, captured = (Rank(mesh.build(comm, 1, 1, ep=1), path, wanted, sampling) for _ in range(2))
        captured.graphs = Target(captured)
        captured.drafting.capture(captured.graphs, lambda done: None)
        return drafted(eager), drafted(captured)

    check(*threads.run(work, 1)[0])


@pytest.mark.parametrize("query_len", [1, 4])
def test_rows_that_fill_a_step_up_have_no_positions_of_others(query_len, monkeypatch):
    """Rotary tables end where the longest sequence does, which is in the step, too."""
    monkeypatch.setattr(DraftGraphs, "_capture", lambda self, run: Called(run))
    longest, size, seen = 64, 4, []
    lengths = torch.tensor([longest, 9, 0, 0], dtype=torch.int32)
    positions = (lengths[:, None].long() - query_len + torch.arange(query_len)).clamp(min=0).flatten()
    rows, starts = torch.tensor([0, 1, -1, -1]), torch.arange(size + 1, dtype=torch.int32) * query_len
    tables = torch.arange(2 * size * longest // 8, dtype=torch.int32).view(size, -1)
    arrays = StepArrays(positions, positions, tables, lengths, rows, starts, starts[:0].long())
    batch = Batch.of(positions, arrays, [query_len] * size, [longest] * size, [], query_len)

    def forward(batch, before):
        seen.append(batch)
        return torch.zeros(len(batch.ids), 2)

    source = SimpleNamespace(FOLLOWS=True, forward=forward, read=lambda hidden: hidden)
    target = SimpleNamespace(
        steps=[(size, 1), (size, 4)], captured_step=lambda *_: (batch, torch.zeros(len(batch.ids), 2))
    )
    graphs = DraftGraphs(source, target, lambda one, ids: one, Upload(torch.device("cpu")), 8)
    graphs.capture(lambda done: None)
    graphs._newest[:] = query_len - 1  # of an earlier step with more rows
    newest = torch.tensor([query_len - 1, 2 * query_len - 1])
    graphs.follow(query_len, positions, newest, np.array([longest - 1, 40]))
    for _ in range(3):
        graphs.go_on(torch.zeros(2, dtype=torch.int64))
    drafted = torch.stack([one.positions for one in seen[1:]])
    assert drafted[:, :2].tolist() == [[63, 9], [63, 10], [63, 11]] and drafted.min() >= 0 and drafted.max() < longest
    assert all((one.slots[2:] == -1).all() and not one.lengths[2:].any() for one in seen[1:])
