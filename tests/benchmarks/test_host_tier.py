"""A small load in a pool that is too small for it."""

import json
import subprocess
import sys

import pytest
from phalanx.benchmarks import host_tier, offline

FLAGS = "--config tiny --device cpu --sequences 4 --prompt 48 --new 32 --conversations 4 --turns 2 --first 96"


def test_a_run():
    command = [sys.executable, host_tier.__file__, *FLAGS.split(), "--question", "16", "--answer", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("a pool of 2 MiB")
    names = "(a) tokens/s", "(b) turn 1,", "(b) turn 2,", "(b) from turn 2 on"
    assert [line.startswith(name) for line, name in zip(lines[2:6], names, strict=True)] == [True] * 4
    without, _, tier, talked = map(json.loads, lines[6:])
    assert not without["host_stores"] and without["preemptions"] > 0
    assert tier["swapped_in"] > 0 and tier["host_loads"] > 0 and talked["host_stores"] > 0


@pytest.mark.parametrize("name, dtype, want", [("llama3-8b", "bf16", 131072), ("tiny", "f32", 4 * 2 * 4 * 64 * 4)])
def test_bytes_of_a_token(name, dtype, want):
    assert host_tier.token_bytes(offline.CONFIGS[name], dtype) == want
