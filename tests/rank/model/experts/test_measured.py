"""--ep 0: times of both layouts decide, the same on all ranks, and whatever they say, logits are the model's."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank.model.experts import measured
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.experts.offload import OffloadOptions
from phalanx.rank.model.load import check, load

from ..harness import distance, reference, reference_logits, run_steps, tokens
from ..test_architectures import MODELS, write
from .test_shared_out import TOLERANCE


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name), **MODELS[name]) for name in ("mixtral", "gpt_oss", "qwen2")}


@pytest.mark.parametrize("name, pp", [("mixtral", 1), ("gpt_oss", 2)])
def test_what_is_really_measured(made, name, pp, caplog):
    caplog.set_level("INFO", "phalanx")
    (logits,) = run_steps(made[name], [tokens(30)], tp=2, pp=pp, ep=0)
    assert distance(logits, reference_logits(reference(made[name]), tokens(30))) < TOLERANCE
    (said,) = [message for message in caplog.messages if "is chosen" in message]
    assert "1, 8, 64 tokens" in said and "--ep 1" in said


@pytest.mark.parametrize("factor, want", [(0.5, 2), (0.99, 1), (2.0, 1)])
def test_the_slowest_rank_decides(made, monkeypatch, caplog, factor, want):
    """Rank 1 alone is fast or slow when experts are shared out."""
    times = {(rank, degree): 1e-3 for rank in range(2) for degree in (1, 2)}
    times[1, 2] *= factor
    times[0, 2] *= min(factor, 0.5)
    monkeypatch.setattr(
        measured, "seconds", lambda layer, mesh, degree, rows, *_: [times[mesh.tensor.rank, degree]] * len(rows)
    )
    caplog.set_level("INFO", "phalanx")

    def rank(world):
        model = load(made["mixtral"], mesh.build(world, 2, 1, ep=0))
        return next(one for one in model.modules() if isinstance(one, FusedExperts)).local_experts

    found = threads.run(rank, 2)
    assert [local_experts and local_experts.ids for local_experts in found] == (
        [range(3), range(3, 6)] if want == 2 else [None, None]
    )
    assert [message.endswith(f": --ep {want} is chosen") for message in caplog.messages if "chosen" in message] == [
        True
    ]


def test_the_choice():
    times = torch.tensor([[1e-3, 4e-3], [2e-3, 1e-3], [2e-3, 2e-3]])
    degree, said = measured.choose([1, 2, 4], (1, 64), times)
    assert degree == 2
    assert "--ep 1: 1000, 4000" in said


def test_where_there_is_nothing_to_measure(made, monkeypatch, caplog):
    """Without experts, and where they are in host memory. A check of files measures nothing either."""
    monkeypatch.setattr(measured, "seconds", None)
    caplog.set_level("INFO", "phalanx")
    threads.run(lambda world: load(made["qwen2"], mesh.build(world, 2, 1, ep=0)), 2)
    threads.run(lambda world: check(made["mixtral"], mesh.build(world, 2, 1, ep=0)), 2)
    assert not [message for message in caplog.messages if "--ep" in message]
    threads.run(lambda world: load(made["mixtral"], mesh.build(world, 2, 1, ep=0), experts=OffloadOptions(2)), 2)
    assert [message for message in caplog.messages if "split" in message and "--ep 1" in message]
