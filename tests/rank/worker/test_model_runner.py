"""Facts that the ranks of a tensor group must agree on, as they choose their collectives by them."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from phalanx import errors
from phalanx.rank import protocol
from phalanx.rank.worker.images import Images
from phalanx.rank.worker.model_runner import DeviceOutput, ModelRunner, StepFuture
from phalanx.rank.worker.pooler import Pooler
from phalanx.rank.worker.prompt_scorer import PromptScorer
from phalanx.rank.worker.sampler import Logprobs
from phalanx.rank.worker.state import ScheduledBatch
from phalanx.rank.worker.token_masks import TokenMasks
from phalanx.rank.worker.upload import Upload


class Samples:
    """Stands for the sampler, which one rank has use for."""

    def __init__(self):
        self.calls = []

    def enter(self, new):
        self.calls.append(new.row)

    def leave(self, row):
        self.calls.append(-row)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_knows_which_rows_are_pooled_and_which_are_greedy(rank):
    """A step with embeddings is no graph's; a rank that replayed one would add up other shapes than the others."""
    runner = ModelRunner.__new__(ModelRunner)
    runner.mesh = SimpleNamespace(last=True, tensor=SimpleNamespace(rank=rank, size=2))
    runner.sampler = Samples()
    runner._pooler = Pooler(SimpleNamespace(rope=SimpleNamespace(device=torch.device("cpu")), hidden_size=3))
    runner._scorer = PromptScorer(None, None, None, rank == 0)
    runner._greedy = np.zeros(4, bool)
    runner._images = Images(
        SimpleNamespace(image_positions=None), SimpleNamespace(), torch.device("cpu"), runner.mesh.tensor
    )
    runner._heads = {}
    runner._token_masks = TokenMasks(4, Upload(torch.device("cpu")))
    kinds = [dict(temperature=0.0, prompt_logprobs=0), dict(), dict(temperature=0.0, pooling="mean")]
    new = [
        protocol.NewSequence(row, protocol.pack_u32([5]), 1, 0, b"", protocol.SamplingParams(max_tokens=1, **kind))
        for row, kind in enumerate(kinds, 1)
    ]
    runner._enter(protocol.Plan(step=0, new=new))
    assert runner._greedy.tolist() == [False, True, False, True] and not runner._pooler.empty
    assert not runner._scorer.empty
    runner._enter(protocol.Plan(step=1, freed=protocol.pack_u16([1, 3])))
    assert runner._pooler.empty and runner._scorer.empty
    assert runner.sampler.calls == ([] if rank else [1, 2, 3, -1, -3])


class Watch:
    """Stands for the watchdog, which ends the process with what it is told."""

    def __init__(self):
        self.failed = []

    def fail(self, error):
        self.failed.append(error)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), None])
def test_memory_that_runs_out_before_the_first_step(error, monkeypatch):
    """Graphs and workspaces are made in the step thread; nobody may take it for ready then."""
    error = error or RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    def prepare(self):
        raise error

    monkeypatch.setattr(ModelRunner, "_prepare", prepare)
    runner = ModelRunner.__new__(ModelRunner)
    runner.watch, runner.ready = Watch(), threading.Event()
    runner._execute_all()
    assert not runner.ready.is_set()
    (told,) = runner.watch.failed
    assert isinstance(told, errors.FatalError) and told.code == errors.MEMORY
    for part in ("workspaces", str(error).rstrip("."), "--max-num-batched-tokens"):
        assert part in str(told)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_steps_tokens_wait_for_drafts_only_where_these_are_to_come_along(keeps):
    runner, result, seen = ModelRunner.__new__(ModelRunner), StepFuture(), []

    def draft():
        seen.append(result.wait(0))
        return None if keeps else torch.tensor([[8, 9]])

    runner._execute = lambda plan: (DeviceOutput(torch.tensor([7])), draft)
    runner._step(protocol.Plan(1, wanted=2, keeps=keeps), result)
    assert seen == [keeps] and result.wait(0)
    output = result.output()
    assert output.tokens() == [[7]] and protocol.unpack_u32(output.drafts).tolist() == ([] if keeps else [8, 9])


def test_drafts_that_the_ranks_keep_are_compared_there():
    """The second row's first draft came with the plan, and it has no second one; the third row has no drafts."""
    runner = ModelRunner.__new__(ModelRunner)
    runner._upload, runner._last = Upload(torch.device("cpu")), torch.tensor([[0, 0, 0], [1, 40, 41], [2, 50, 51]])
    rows, made, none = np.array([2, 1, 0]), protocol.MADE, protocol.NO_DRAFT
    scheduled = ScheduledBatch(
        rows, np.array([5, 6, 7]), np.array([3, 3, 1]), np.ones(3, bool), np.zeros(3, np.int64), 3,
        np.array([[made, made], [60, none]]),
    )  # fmt: skip
    ids = torch.tensor([50, 51, 3, 60, 4, 5, 6])
    newest = runner._keep(torch.from_numpy(scheduled.sampled_rows), ids, scheduled)
    assert newest.tolist() == [2, 4, 6] and runner._last[:, 0].tolist() == [6, 4, 3]
    ids[0] = 49
    runner._last[2, 0] = 2
    assert runner._keep(torch.from_numpy(scheduled.sampled_rows), ids, scheduled).tolist() == [0, 4, 6]
    assert runner._last[:, 0].tolist() == [6, 4, 49]


def test_the_output_has_what_stands():
    """Tokens of three rows stand unless they are rejected; one row has no others, and no memory was left for it."""
    result = StepFuture()
    found = Logprobs([0, 1, 5], [1, 1, 1], torch.tensor([-1.0, -2.0, -3.0]), -torch.ones(3, 1), torch.ones(3, 1).long())
    result.set(DeviceOutput(
        torch.arange(10, 17), found, failed=[6], counts=np.array([3, 3, 1]), newest=torch.tensor([0, 5, 6]),
    ))  # fmt: skip
    output = result.output()
    assert output.tokens() == [[10], [13, 14, 15], [16]] and output.failed == [2]
    assert {at: (one.token, one.logprob) for at, one in output.logprobs.items()} == {0: (10, -1.0), 3: (15, -3.0)}
