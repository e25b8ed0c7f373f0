"""All parts of a step that host.py times are still there."""

import json
import subprocess
import sys

from phalanx.benchmarks import host


def test_a_run():
    command = [sys.executable, host.__file__, "--sequences", "4", "--steps", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["prefix_cache"], line["arrivals"]) for line in lines] == [
        (True, 0),
        (True, 1),
        (False, 0),
        (False, 1),
    ]
    each = {"schedule", "encode", "apply", "output", "update", "frame"}
    assert [set(line["us"]) for line in lines] == [each | {"send"}, each | {"build"}] * 2
