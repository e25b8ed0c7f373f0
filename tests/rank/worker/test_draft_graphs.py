"""Drafts behind captured steps are those behind eager ones; without a GPU, functions stand for what is captured."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.decode_batch import HostDecodeBatch
from phalanx.rank.worker.draft_graphs import DraftGraphs

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
