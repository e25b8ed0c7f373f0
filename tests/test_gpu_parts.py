"""tests/gpu.sh runs every test that needs a GPU, in parts that each end in time; stand-ins print what they get."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CALL = 600  # seconds that a command may last on a lent machine


@pytest.fixture
def run(tmp_path):
    """Runs the parts of these names: what each would have started, and the whole process."""
    for name in ("nvidia-smi", "timeout", "python"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*"\n')
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}

    def call(*names):
        command = ["bash", str(ROOT / "tests/gpu.sh"), *names]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        return dict(re.findall(r"^== (\S+)\ntimeout -k 5 (.*)$", done.stdout, re.M)), done

    return call


def test_every_test_of_gpus_is_in_a_part_and_every_path_is_there(run):
    parts, done = run()
    assert done.returncode == 0 and len(parts) > 10
    given = [word for line in parts.values() for word in line.split() if word.startswith("tests/")]
    assert [path for path in given if not (ROOT / path).is_file()] == []
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*_gpu.py")}
    assert there and there - set(given) == set()
    assert len(given) == len(set(given)) + 2  # of test_served.py there are three parts, of others one


def test_kernels_in_cpp_are_a_part(run):
    (line,) = run("kernels-cpu")[0].values()
    kernels = ROOT / "tests/kernels"
    there = {one for one in kernels.rglob("test_*.py") if "cpu" in one.name or one.parent.name == "cpp"}
    assert there and {str(one.relative_to(ROOT)) for one in there} <= set(line.split())


def test_each_part_ends_within_a_call(run):
    parts, _ = run()
    assert all(0 < int(line.split()[0]) + 60 <= CALL for line in parts.values())


def test_parts_by_name(run):
    everything = list(run()[0])
    assert list(run("worker", "kernels-moe")[0]) == ["kernels-moe", "worker"]
    assert list(run("kernels")[0]) == [one for one in everything if one.startswith("kernels-")]
    parts, done = run("list")
    assert not parts and done.stdout.split("\n")[-len(everything) - 1 : -1] == everything
    parts, done = run("kernel")
    assert not parts and done.returncode == 2 and "parts: topology kernels-small" in done.stderr
