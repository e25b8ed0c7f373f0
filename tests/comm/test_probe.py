"""Messages of doctor's ranks about GPUs that they cannot use. test_doctor_live.py tries the rest on live ranks."""

import sys

import torch
from phalanx.comm import probe, threads


def problems(monkeypatch, ranks: int, seen: bool) -> str:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    return str(threads.run(lambda world: probe._on_gpus(world, 0), ranks)[0])


def test_gpus_that_pytorch_does_not_see(monkeypatch):
    said = problems(monkeypatch, 1, seen=False)
    assert f"PyTorch {torch.__version__}" in said and "TORCH=cuda" in said


def test_several_gpus_without_cupy(monkeypatch):
    said = problems(monkeypatch, 2, seen=True)
    assert "several GPUs" in said and "`pip install phalanx[gpu]`" in said
