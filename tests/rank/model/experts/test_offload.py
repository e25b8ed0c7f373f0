"""What is measured at the start of a rank with experts in host memory."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from phalanx.rank.model.experts import offload


def test_both_beside_each_other(monkeypatch):
    """The CPU computes as long as copies run, and each is compared with what it takes alone."""
    asked, looks = [], iter([False, False, True])
    event = SimpleNamespace(
        record=lambda: None, query=lambda: next(looks), synchronize=lambda: None, elapsed_time=lambda other: 24.0
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    streamer = SimpleNamespace(at_once=lambda stack: 4, copies=lambda stack, experts: asked.append(experts) or [])
    stack, times = SimpleNamespace(stack=SimpleNamespace(size=10)), iter([3.0, 4.0, 5.0, 9.0])
    cpu, copies = offload._beside(stack, streamer, lambda: next(times), 2.0, 1e-3)
    assert cpu == 2.0 and copies == pytest.approx(24e-3 / 4e-3 / len(asked))
    assert len(asked) == 2 and np.concatenate(asked).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
