"""Speeds of this host: the file system under a model, and the processors, saved for `phalanx fit`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from .... import child_python
from ... import hf_hub
from ...job import binding, mpi_env
from ..fit import devices
from ..fit.devices import CpuSpeed
from . import disk
from .check import FAIL, OK, WARN, Check, gb
from .probe_report import ProbeReport

SLOW_DISK = 0.2  # GB/s: 16 GB of weights take more than a minute
SMALL = 256 << 20  # bytes: less is read in too short a time to tell
PATIENCE = 40.0  # seconds for the processors
KERNEL_COMPILER = "phalanx.kernels.cpp.compiler"


def file_system(model: str) -> Check:
    """model: a directory or GGUF file, or an id of the hub, which serve finds in the cache."""
    directory = Path(model).expanduser()
    if not directory.exists():
        if not hf_hub.is_id(model):
            text = f"{model}: there is no such directory on {mpi_env.hostname()}"
            return Check("disk", FAIL, text, "--model DIR names a model's directory or GGUF file")
        directory = Path(hf_hub.cached(model))
        if not directory.name:
            return Check("disk", WARN, f"{model} is not in the cache", f"fetch it first: phalanx pull {model}")
    try:
        speed = disk.measure(directory)
    except OSError as error:
        return Check("disk", FAIL, f"{directory}: {error.strerror}", "the weights cannot be read from here")
    if speed is None:
        return Check("disk", WARN, f"{directory} has no weight files", "nothing was read; --model DIR names a model's")
    text = f"{directory} ({speed.kind}): {speed.gbps:.2g} GB/s of {gb(speed.bytes)} read"
    if not speed.direct:
        text += ", perhaps from the page cache"
    if speed.bytes < SMALL:
        return Check("disk", OK, f"{text}; too little to be exact")
    seconds = speed.total / speed.gbps / 1e9
    text += f": {gb(speed.total)} of weights load in {seconds:.0f} s"
    if speed.gbps < SLOW_DISK:
        return Check("disk", WARN, text, "copy the model to a faster or node-local file system first")
    return Check("disk", OK, text)


def compiler() -> Check:
    """Whether C++ kernels for this CPU can be made; by a process of its own, as the launcher loads no kernels."""
    slower = "torch computes on CPUs, up to three times slower"
    try:
        line = child_python.command("-m", KERNEL_COMPILER)
        done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return Check("compiler", WARN, f"no C++ kernel was made within {PATIENCE:g} s", slower)
    if isa := done.stdout.strip():
        return Check("compiler", OK, f"C++ kernels for {isa}")
    advice = "install g++ or clang++, or `pip install 'phalanx[cpu]'`"
    return Check("compiler", WARN, f"no C++ compiler works here: {slower}", advice)


def processors(found: ProbeReport | None, environ: Mapping[str, str]) -> Check:
    """Measures all cores of this host in a process of its own, and saves what it finds."""
    cpus = binding.allowed()
    cores = len(binding.by_core(cpus))
    child = {name: value for name, value in mpi_env.without_mpi(environ).items() if name != "OMP_NUM_THREADS"}
    try:
        done = subprocess.run(
            child_python.command("-m", f"{__package__}.cpu"),
            env=child | {"OMP_NUM_THREADS": str(max(1, min(cores, int(min(binding.quota(), cores)))))},
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        measured = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Check("cpu", WARN, f"not measured within {PATIENCE:g} s", "other programs are on these cores")
    except ValueError:
        why = done.stderr.strip().rpartition("\n")[2]
        return Check("cpu", FAIL, f"PyTorch does not compute: {why}", "`make install` puts it right")
    small = found.all_reduce[0].us if found is not None and found.all_reduce else 0.0
    speed = CpuSpeed(mpi_env.hostname(), cores, measured["gflops"], measured["gbps"], small, date.today().isoformat())
    text = f"{cores} cores: {speed.gflops:.0f} GFLOP/s in f32, {speed.gbps:.1f} GB/s from memory"
    try:
        path = devices.save_speed(speed, environ)
    except OSError as error:
        path = devices.speed_file(environ)
        return Check("cpu", WARN, text, f"not kept for `phalanx fit`: {path}: {error.strerror}")
    return Check("cpu", OK, f"{text}; saved for `phalanx fit` in {path}")
