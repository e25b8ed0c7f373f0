"""The doctor's measurements and verdicts: disks and processors."""

import errno
import os
import re
import subprocess
import sys

import msgspec
import pytest
from phalanx.kernels.cpp import compiler
from phalanx.launcher import hf_hub
from phalanx.launcher.commands.doctor import cpu, disk, speeds
from phalanx.launcher.commands.doctor.check import OK, WARN
from phalanx.launcher.commands.fit import devices
from phalanx.launcher.job import mpi_env
from phalanx.rank import filesystems

from .test_doctor import GB, found

# Disks


def test_the_disk_is_read_past_the_cache(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(os.urandom(10_000_001))  # no multiple of anything
    (tmp_path / "small.safetensors").write_bytes(b"x")
    speed = disk.measure(tmp_path)
    assert (speed.bytes, speed.total) == (10_000_001, 10_000_002)
    assert speed.gbps > 0 and speed.kind == filesystems.kind(tmp_path)
    assert disk.measure(tmp_path, most=1 << 20).bytes >= 1 << 20
    check = speeds.file_system(str(tmp_path))
    assert check.state == OK and "read; too little" in check.text or "page cache" in check.text


def test_file_systems_without_direct_reads(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(os.urandom(3_000_000))
    open_file = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *more)

    monkeypatch.setattr(disk.os, "open", refuse)
    speed = disk.measure(tmp_path)
    assert (speed.bytes, speed.direct) == (3_000_000, False)
    assert "page cache" in speeds.file_system(str(tmp_path)).text


def test_a_model_that_is_not_there_is_named(tmp_path, monkeypatch):
    host = mpi_env.hostname()
    assert re.search(f"FAIL +disk .*/nowhere/model.*{host}.*--model", speeds.file_system("/nowhere/model").line())
    monkeypatch.setattr(hf_hub, "cached", lambda id: "")
    said = "WARN  disk         some/model is not in the cache; fetch it first: phalanx pull some/model"
    assert speeds.file_system("some/model").line() == said
    (tmp_path / "model.gguf").write_bytes(bytes(3_000_000))
    monkeypatch.setattr(hf_hub, "cached", lambda id: str(tmp_path))
    assert speeds.file_system("some/model").state == speeds.file_system(f"{tmp_path}/model.gguf").state == OK


def test_what_is_said_of_disks(tmp_path, monkeypatch):
    assert f"WARN  disk         {tmp_path}" in speeds.file_system(str(tmp_path)).line()
    slow = disk.Speed(300 << 20, 3.0, True, "nfs4", 16 * GB)
    monkeypatch.setattr(disk, "measure", lambda _: slow)
    assert re.search(f"WARN +disk.*{tmp_path}.*nfs4.*153 s", speeds.file_system(str(tmp_path)).line())
    monkeypatch.setattr(disk, "measure", lambda _: msgspec.structs.replace(slow, seconds=0.1))
    assert speeds.file_system(str(tmp_path)).state == OK

    def refuse(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(disk, "measure", refuse)
    assert f"disk         {tmp_path}: Permission denied;" in speeds.file_system(str(tmp_path)).line()


# Processors


def test_processors_are_measured():
    measured = cpu.measure(side=256, size=8 << 20, seconds=0.1)
    assert measured["gflops"] > 0 and measured["gbps"] > 0 and measured["threads"] >= 1


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ("avx2\n", "OK    compiler     C++ kernels for avx2"),
        (
            "",
            "WARN  compiler     no C++ compiler works here: torch computes on CPUs, up to three times slower; "
            "install g++ or clang++, or `pip install 'phalanx[cpu]'`",
        ),
    ],
)
def test_a_compiler_for_the_kernels_is_looked_for(monkeypatch, made, line):
    monkeypatch.setattr(speeds.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, made, ""))
    assert speeds.compiler().line() == line


def test_what_asks_for_the_compiler_runs():
    command = [sys.executable, "-m", speeds.KERNEL_COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.strip() in ("", *compiler.ISAS)


def processors(monkeypatch, tmp_path, result):
    def run(*_, **__):
        if isinstance(result, Exception):
            raise result
        return subprocess.CompletedProcess([], 0, *result)

    monkeypatch.setattr(speeds.subprocess, "run", run)
    return speeds.processors(found(), {"XDG_CACHE_HOME": str(tmp_path)})


def test_what_is_said_of_processors(monkeypatch, tmp_path):
    good = processors(monkeypatch, tmp_path, ('{"gflops": 200.4, "gbps": 19.0, "threads": 2}', ""))
    path = tmp_path / "phalanx/cpu-speed.json"
    assert good.state == OK
    assert f"`phalanx fit` in {path}" in good.text
    kept = devices.saved_speed({"XDG_CACHE_HOME": str(tmp_path)})
    assert (kept.gflops, kept.gbps, kept.all_reduce_us) == (200.4, 19.0, 15.0)
    late = processors(monkeypatch, tmp_path, subprocess.TimeoutExpired("x", 40))
    assert "measured within 40" in late.line()
    broken = processors(monkeypatch, tmp_path, ("", "Traceback\nImportError: no torch\n"))
    assert "compute: ImportError:" in broken.line()
    (tmp_path / "file").write_text("")
    full = processors(monkeypatch, tmp_path / "file", ('{"gflops": 200.0, "gbps": 19.0, "threads": 2}', ""))
    assert full.state == WARN and "`phalanx fit`" in full.advice
