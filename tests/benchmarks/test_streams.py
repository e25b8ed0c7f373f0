"""benchmarks/streams.py: a few streams for a moment."""

import contextlib
import json

import pytest
from phalanx.benchmarks import streams

pytestmark = pytest.mark.timeout(120)


@pytest.mark.long
@pytest.mark.retry(reason="a machine that stands still while an answer comes leaves less time between its tokens")
def test_both_ways_take_the_steps_that_the_model_takes(capsys):
    """How near they are to each other is for a quiet machine."""
    asked = {"streams": 130, "step-ms": 5, "tokens": 40, "rounds": 1, "most": 1000}
    assert streams.main([f"--{name}={value}" for name, value in asked.items()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(len(rounds) == 1 and rounds[0] >= 5 for rounds in found["ms_a_step"].values())
    assert found["ratio"] == pytest.approx(found["median_ms"]["streams"] / found["median_ms"]["whole"], abs=1e-3)


def test_too_many(capsys, monkeypatch):
    async def measured(asked):
        return {"ratio": 1.06}

    monkeypatch.setattr(streams, "measure", measured)
    monkeypatch.setattr(streams, "paced", lambda asked: contextlib.nullcontext())
    assert streams.main(["--streams", "1"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ratio": 1.06}


def test_no_time_between_tokens(capsys, monkeypatch):
    """A server process that stood still sees all of an answer's tokens at once."""

    async def pace(client, bodies, streamed):
        return 0.01 if streamed else 0.0

    def paced(asked):
        asked.port = 1
        return contextlib.nullcontext()

    monkeypatch.setattr(streams, "pace", pace)
    monkeypatch.setattr(streams, "paced", paced)
    assert streams.main(["--streams", "1", "--rounds", "3"]) == 1
    told = capsys.readouterr()
    assert "answer at once" in told.err and not told.out
