"""The shares of overlapping kernels add up to the step."""

import pytest
from phalanx.benchmarks import budget

from ..fields import each


def test_shares_add_up():
    events = []
    for step in range(8):
        at = step * 100.0
        events += [
            dict(name="decode_inputs", ts=at, dur=4.0),
            dict(name="void at::native::norm<float>(float*)", ts=at + 3, dur=7.0),  # starts before its predecessor ends
            dict(name="gemm", ts=at + 12, dur=50.0),
            dict(name="gemm", ts=at + 62, dur=28.0),
        ]
    lines = budget.budget(events)
    assert [(line["kernel"], line["calls"], line["us"], line["lasts"]) for line in lines] == [
        ("gemm", 2.0, 80.0, 39.0),
        ("decode_inputs", 1.0, 14.0, 4.0),
        ("norm<float>", 1.0, 6.0, 7.0),
    ]
    assert sum(each(lines, "us")) == 100


def test_the_time_before_a_step_without_a_kernel():
    """Copies do not count, nor do the kernels of further cache groups."""
    events = []
    for step in range(8):
        at = step * 100.0
        events += [
            dict(cat="gpu_memcpy", name="Memcpy HtoD", ts=at - 3, dur=2.0),
            dict(cat="kernel", name="decode_inputs", ts=at, dur=4.0),
            dict(cat="kernel", name="decode_inputs", ts=at + 3, dur=4.0),
            dict(cat="kernel", name="gemm", ts=at + 8, dur=92.0 - 10 * step),
        ]
    assert budget.idle(events) == 45  # before the steps 4 to 7: 30, 40, 50, 60


def test_steps_that_no_graph_replays():
    with pytest.raises(SystemExit, match="needs 6.*replayed.*found 0"):
        budget.budget([dict(name="gemm", ts=0.0, dur=1.0)])


def test_shares_of_prompt_and_decode_steps():
    names = ["gemm", "norm", "decode_inputs", "gemm", "argmax", "gemm", "decode_inputs", "argmax"]
    events = [dict(name=name, ts=i * 1e6, dur=1e6) for i, name in enumerate(names)]
    found = budget.shares(events)
    assert found["prompt"] == {"gemm": 2.0, "norm": 1.0}
    assert found["decode"] == {"decode_inputs": 2.0, "argmax": 2.0, "gemm": 1.0}
    assert list(found["decode"].values()) == sorted(found["decode"].values(), reverse=True)
