"""Triton's kernels in its interpreter, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Imports make no garbage, and looking for it would take a quarter of their time.
PROGRAM = """
import gc, runpy, sys
gc.set_threshold(1_000_000)
runpy.run_module(sys.argv[1], run_name="__main__")
"""


def interpret(module: str, timeout: float = 300) -> None:
    """Run a module of these tests, in a process of its own: kernels are interpreted or compiled from the moment that
    Triton is imported. The test's own timeout has to be longer than this one, in seconds."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", PROGRAM, f"phalanx.tests.kernels.{module}"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
