"""Choices made before a weight is read."""

import json

import pytest
import torch
from phalanx.rank.model.choices import choose_dtype
from phalanx.rank.model.config import read_config

from ...checkpoints import make_config


@pytest.mark.parametrize("stored, wanted, on_cpu, on_gpu", [
    ("bfloat16", "auto", "f32", "bf16"),
    ("float16", "auto", "f32", "f16"),
    ("float32", "auto", "f32", "bf16"),
    ("float32", "f16", "f16", "f16"),
])  # fmt: skip
def test_dtype(tmp_path, stored, wanted, on_cpu, on_gpu):
    (tmp_path / "config.json").write_text(json.dumps(make_config("llama", dtype=stored)))
    config = read_config(tmp_path)
    assert choose_dtype(wanted, config, torch.device("cpu")) == on_cpu
    assert choose_dtype(wanted, config, torch.device("cuda")) == on_gpu
