"""benchmarks/load.py: what it counts, and that a run gives lines for both ways."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from phalanx.benchmarks import load
from phalanx.rank.model.weights.safetensors import Checkpoint, Entry, Index
from phalanx.rank.model.weights.slicing import Slice

from ..ranks import environment


def touched(shape, ranges, start=0):
    size = 4 * torch.Size(shape).numel()
    listing = Index({"w": "f"}, {"f": {"w": Entry("F32", shape, start, start + size)}})
    return load.touched(Checkpoint(Path(), listing), [Slice("w", shape, ranges, None, "", ())])


def test_pages_under_a_slice():
    assert touched((1024,), ((0, 1024),)) == 4096
    assert touched((1024,), ((0, 1024),), start=8) == 8192
    assert touched((1024,), ((10, 10),)) == 0
    assert touched((4, 4096), ((0, 4), (0, 1024))) == 4 * 4096  # a page of each row's four
    assert touched((4, 512), ((0, 4), (0, 256))) == 2 * 4096  # two rows to a page: all of it
    assert touched((8, 4096), ((2, 3), (0, 4096))) == 4 * 4096


@pytest.mark.long
def test_a_run_tells_of_both_ways(tmp_path):
    lines = tmp_path / "lines.jsonl"
    program = Path(load.__file__).resolve()
    words = ["--gb", "0.1", "--np", "2", "--json", str(lines), "--dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(program), *words], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    direct, striped = map(json.loads, lines.read_text().splitlines())
    assert (direct["way"], striped["way"]) == ("direct", "striped")
    # 8000 x 2048 twice, one layer of 2048 x 2048 x 2.5 and 5632 x 2048 x 3, norms; in bf16
    weights = 2 * (2 * 8000 * 2048 + 2048 * 2048 * 2.5 + 5632 * 2048 * 3 + 3 * 2048) / 1e9
    assert abs(striped["gb"] - weights) < 1e-3
    assert abs(sum(striped["asked_gb"]) - weights) < 3e-3 < sum(direct["asked_gb"]) - weights
    assert max(striped["asked_gb"]) - min(striped["asked_gb"]) < 2e-3
    assert striped["gb_per_s"] > 0 and striped["cache"] == "cold" and striped["hosts"] == 1
    assert "striped  " in done.stdout and done.stdout.count("    rank 1 ") == 2
    assert list(tmp_path.iterdir()) == [lines]  # the checkpoint is gone


@pytest.mark.long
def test_under_mpirun_a_directory_is_needed():
    done = subprocess.run(
        [sys.executable, load.__file__],
        env=environment(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "load.py: under mpirun" in done.stderr
