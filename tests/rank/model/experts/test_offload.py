"""Measurements at the start of a rank with experts in host memory."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from phalanx.errors import USAGE, FatalError
from phalanx.kernels.moe.host_choice import Costs
from phalanx.kernels.moe.moe import LocalExperts
from phalanx.rank.model.experts import offload
from phalanx.rank.model.experts.host import HostExperts


def test_both_beside_each_other(monkeypatch):
    """The CPU computes as long as copies run, and each is compared with what it takes alone. What the first call takes,
    or one among others, does not count."""
    asked, looks = [], iter([False, False, True])
    event = SimpleNamespace(
        record=lambda: None, query=lambda: next(looks), synchronize=lambda: None, elapsed_time=lambda other: 24.0
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    streamer = SimpleNamespace(at_once=lambda stack: 4, copies=lambda stack, experts: asked.append(experts) or [])
    stack, times = SimpleNamespace(stack=SimpleNamespace(size=10)), iter([300.0, 3.0, 4.0, 500.0, 9.0])
    cpu, copies = offload._overlapped(stack, streamer, lambda: next(times), 2.0, 1e-3)
    assert cpu == 2.0 and copies == pytest.approx(24e-3 / 4e-3 / len(asked))
    assert len(asked) == 2 and np.concatenate(asked).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "on_gpu, placement, fixed, slots, tokens, seconds",
    [
        (False, "auto", 0, 4, 40, 8 * 4.0),  # 40 tokens of 2 of 16 experts: 5 for each; 8 are here
        (False, "auto", 0, 4, 1024, 8 * 64.0 * 2),  # twice what was timed
        (False, "auto", 0, 4, 1, 8 * 1.0),
        (False, "auto", 3, 1, 40, 8 * 4.0),
        (True, "cpu", 0, 2, 1024, 6 * 128.0),
        (True, "auto", 0, 2, 1024, 6 * 3.0),
        (True, "auto", 3, 2, 1024, 3 * 3.0),
        (True, "stream", 0, 8, 1024, 0.0),
    ],
)
def test_the_longest_step(on_gpu, placement, fixed, slots, tokens, seconds):
    """Two layers alike, and one on the device."""
    costs = Costs((1.0, 3.0, 15.0, 64.0), 3.0)
    one = HostExperts.__new__(HostExperts)
    one.on_gpu, one.fixed, one.local_experts = on_gpu, fixed, LocalExperts(fixed, 8 - fixed, 16)
    one.set, one.shared, one._choice = (SimpleNamespace(slots=slots), SimpleNamespace(placement=placement),
                                        SimpleNamespace(costs=costs))  # fmt: skip
    layer = SimpleNamespace(host=one, top_k=2)
    all_layers = offload.Offload.__new__(offload.Offload)
    all_layers.layers = [layer, layer, SimpleNamespace(host=None, top_k=2)]
    assert all_layers.longest_step(tokens) == pytest.approx(2 * seconds)


def test_experts_in_host_memory_need_a_compiler(monkeypatch):
    monkeypatch.setattr(offload.ops, "available", lambda: False)
    with pytest.raises(FatalError, match="compiler") as stopped:
        offload.Offload([SimpleNamespace()], offload.ON_DEVICE, torch.float32, torch.device("cpu"))
    assert stopped.value.code == USAGE
