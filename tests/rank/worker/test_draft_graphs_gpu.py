"""Drafts that a GPU replays behind captured steps of more rows than there are, beside those of eager steps."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank import protocol
from phalanx.rank.worker import graphs
from phalanx.rank.worker.model_runner import DeviceOutput, ModelRunner, StepFuture, step_stream

from ...devices import require_gpu
from .test_draft_graphs import CASES, check, drafted
from .test_drafting import NAMES, Rank, made

require_gpu()
__all__ = ["made"]  # a fixture


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", CASES, ids=["greedy", "mixed"])
def test_captured_drafts_are_those_of_eager_steps(made, name, sampling, monkeypatch):
    monkeypatch.setattr(graphs, "capture_sizes", lambda *_: [4])
    path, wanted = made(name)

    def work(comm):
        torch.cuda.set_stream(step_stream(torch.device("cuda", 0)))
        eager, captured = (Rank(mesh.build(comm, 1, 1, ep=1), path, wanted, sampling, device="cuda") for _ in range(2))
        of = captured.model, captured.state, captured.last, captured.caches, captured.upload, (1, 3)
        captured.graphs = graphs.DecodeGraphs(*of)
        captured.graphs.capture(lambda done: None)
        captured.drafting.capture(captured.graphs, lambda done: None)
        return drafted(eager), drafted(captured)

    check(*threads.run(work, 1)[0])


@pytest.mark.parametrize("keeps", [True, False])
def test_the_host_has_a_steps_tokens_while_drafts_are_computed(keeps):
    """It has, if the ranks keep the drafts."""
    runner, result, stream = ModelRunner.__new__(ModelRunner), StepFuture(), step_stream(torch.device("cuda", 0))
    with torch.cuda.stream(stream):
        ids = torch.tensor([7], device="cuda")
        runner._execute = lambda plan: (DeviceOutput(ids), lambda: torch.cuda._sleep(1 << 29))  # 0.3 s
        runner._step(protocol.Plan(1, wanted=1, keeps=keeps), result)
        result.wait(None)
        assert stream.query() != keeps and result.output().tokens() == [[7]]
