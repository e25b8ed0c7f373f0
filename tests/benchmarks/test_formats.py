"""benchmarks/formats.py on a few documents: each way to a format loads, and loses next to nothing."""

import json

import pytest
import torch
from phalanx.benchmarks import formats
from phalanx.kernels.quantized.linear import dequantize
from safetensors.torch import load_file

from ..fields import each


def lines(*names, count=2):
    return [line for name in names for line in formats.measure(name, count, "cpu", "f32")]


@pytest.mark.long
def test_ways_and_the_table(tmp_path, monkeypatch, capsys):
    found = lines("plain", "q8_0")
    assert each(found, "how") == ["plain", "isq", "convert", "gguf-py"]
    plain, isq, file, theirs = (one["perplexity"] for one in found)
    assert 1 < plain < 3 and isq == pytest.approx(theirs, abs=1e-6) and abs(file / plain - 1) < 0.005
    results = tmp_path / "x.jsonl"
    results.write_text("".join(json.dumps(one) + "\n" for one in found))
    monkeypatch.setattr("sys.argv", ["formats.py", "--json", str(results), "--table"])
    formats.main()
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].split(" | ")[1] == f"{plain:.4f}"
    assert "launcher/builtin_model DST --to q8_0`" in rows[3] and "%)" in rows[3]


def test_commands(monkeypatch):
    monkeypatch.setattr(formats, "perplexity", lambda *a, **k: 1.0)
    monkeypatch.setattr(formats.program, "convert", lambda question: None)
    monkeypatch.setattr(formats, "read_windows", lambda options, source: ([], []))
    found = {one["format"]: one["command"] for one in lines("gptq-8", "awq", "gptq-asymmetric", "fp8")}
    begin, end = "phalanx convert launcher/builtin_model DST --to", "--group 64 --samples 32 --seqlen 256"
    assert found == {
        "gptq-8": f"{begin} gptq --bits 8 {end}",
        "awq": f"{begin} awq {end}",
        "gptq-asymmetric": f"{begin} gptq --no-sym {end}",
        "fp8": f"{begin} fp8",
    }


def test_padded_weights_are_those_of_whole_super_blocks(tmp_path):
    made = load_file(formats.padded("q4k", tmp_path) / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = load_file(formats.MODEL / "model.safetensors")[name].float()
    assert weight.shape[1] % 256 and made[name].shape == weight.shape
    whole = weight[:, : weight.shape[1] // 256 * 256].contiguous()
    codec = formats.PADDED["q4k"]
    assert torch.equal(made[name][:, : whole.shape[1]], dequantize(codec.pack(*codec.encode(whole))))
    assert 0 < (made[name] - weight).square().mean().sqrt() < 0.1 * weight.std()
