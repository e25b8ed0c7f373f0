"""A small load in a pool that is too small for it."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from phalanx.benchmarks import host_tier, shapes
from phalanx.rank import protocol

COMMAND = (
    *(sys.executable, host_tier.__file__, "--config", "tiny", "--device", "cpu"),
    *"--sequences 6 --prompt 64 --new 64 --conversations 4 --turns 2 --first 96 --question 16 --answer 4".split(),
)


@pytest.mark.long
def test_a_run():
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("a pool of 2 MiB")
    names = "(a) tokens/s", "(b) turn 1,", "(b) turn 2,", "(b) from turn 2 on"
    assert [line.startswith(name) for line, name in zip(lines[2:6], names, strict=True)] == [True] * 4
    without, _, tier, talked = map(json.loads, lines[6:])
    assert without["preemptions"] > 0
    assert tier["preemptions"] > 0
    assert not without["host_stores"]
    used = "--kvcache-mem-cpu is not used" not in done.stderr  # a machine that is busy may measure slow copies
    assert (talked["host_stores"] > 0) == (talked["host_loads"] > 0) == used


@pytest.mark.long
def test_one_of_both_jobs():
    command = [*COMMAND, "--only", "recomputed", "--turns", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    oversubscribed, turn, talked = map(json.loads, done.stdout.splitlines()[1:])
    assert oversubscribed["preemptions"] > 0
    assert oversubscribed["tokens_per_s"] > 0
    assert not talked["host_stores"]
    assert turn["turn"] == 1


class AllCached(host_tier.Load):
    """Each prompt is in the cache, and answered at once."""

    def _send(self, ids, new, conversation):
        self._open[str(conversation)] = host_tier.Turn(conversation, 0.0, 1.0, len(ids), [1] * new)

    def _step(self):
        done, self._open = list(self._open.values()), {}
        return done


def test_the_cached_share_is_of_prompts(monkeypatch):
    lines = []
    monkeypatch.setattr(host_tier.step, "say", lambda **line: lines.append(line))
    sizes = dict(sequences=0, prompt=0, new=0, conversations=3, turns=2, first=8, question=4, answer=2, at_once=2)
    AllCached(host_tier.Ask(**sizes), SimpleNamespace(stats=protocol.Stats), 100)._talk()
    assert [line["cached"] for line in lines if line["what"] == "turn"] == [1, 1]


@pytest.mark.parametrize("name, dtype, want", [("llama3-8b", "bf16", 131072), ("tiny", "f32", 8192)])
def test_bytes_of_a_token(name, dtype, want):
    assert host_tier.token_bytes(shapes.CONFIGS[name], dtype, fp8=False) == want
    assert host_tier.token_bytes(shapes.CONFIGS[name], dtype, fp8=True) == want // host_tier.WIDTH[dtype]
