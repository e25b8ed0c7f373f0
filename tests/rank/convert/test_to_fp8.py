"""FP8 checkpoints that are written here load as what their codes and scales mean."""

import json
import shutil

import pytest
import torch
from phalanx.rank.convert import __main__ as program
from phalanx.rank.convert import to_fp8
from safetensors.torch import load_file, save_file

from ..model.harness import distance, run_steps, tokens
from ..model.test_architectures import MODELS, write


@pytest.mark.parametrize("name, tp", [("qwen3_moe", 1), ("phi3", 2)])
def test_loads_as_it_is_meant(tmp_path, name, tp):
    """Each expert's linears, and those that a checkpoint holds merged."""
    source, made = write(tmp_path / "plain", **MODELS[name]), tmp_path / "made"
    made.mkdir()
    program.convert(program.Question(str(source), str(made), "fp8", 4, 0, True, False, "cpu", "auto", [], []))
    stored = load_file(made / "model.safetensors")
    coded = [one for one in stored if f"{one}_scale_inv" in stored]
    assert any("experts.0.down_proj" in one or "qkv_proj" in one for one in coded)
    assert all(stored[one].dtype == torch.float8_e4m3fn for one in coded)
    assert not any("gate.weight" in one or "embed" in one or "lm_head" in one for one in coded)
    meant = shutil.copytree(source, tmp_path / "meant")
    for one in coded:
        by = stored.pop(f"{one}_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
        stored[one] = stored[one].float() * by[: stored[one].shape[0], : stored[one].shape[1]]
    save_file(stored, meant / "model.safetensors", {"format": "pt"})
    assert "quantization_config" in json.loads((made / "config.json").read_text())
    got, want = (run_steps(path, [tokens(30)], tp=tp)[0] for path in (made, meant))
    assert distance(got, want) < 1e-4


def test_codes_of_odd_sizes():
    weight = torch.randn(130, 300)
    weight[:, 128:256] = 0
    codes, scales = to_fp8.encode(weight)
    assert scales.shape == (2, 3) and not scales[:, 1].any() and not codes[:, 128:256].float().any()
    meant = codes.float() * scales.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :300]
    assert ((meant - weight).abs() <= weight.abs() / 16 + scales.max() * 2.0**-10).all()
    assert scales[1, 2] == weight[128:, 256:].abs().max() / 448
