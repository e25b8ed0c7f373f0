"""DeepSeek-V4 as it is published: linears in FP8 with scales e8m0, experts in MXFP4, under DeepSeek's own names."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..harness import distance, run_steps, tokens
from ..shapes import MODELS
from ..test_architectures import write
from .test_mxfp4 import encode, meaning

TOLERANCE = 1e-4
EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
LINEAR = re.compile(r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight$|\.shared_experts\.w[123]\.weight$")
BLOCK = 16, 32
SETTINGS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
    "weight_block_size": list(BLOCK),
}  # fmt: skip


def fp8(weight):
    """weight [O, I] → e4m3 codes, a scale e8m0 for each block, and what they mean."""
    outputs, inputs = BLOCK
    codes, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // outputs), -(-weight.shape[1] // inputs))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = slice(row * outputs, (row + 1) * outputs), slice(column * inputs, (column + 1) * inputs)
            scale = scales[row, column] = torch.exp2((weight[at].abs().max() / 448).log2().ceil())
            codes[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
            meant[at] = codes[at].float() * scale
    return codes, scales.to(torch.float8_e8m0fnu), meant


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint, and one that has in plain what it means."""
    folder = tmp_path_factory.mktemp("deepseek_v4")
    sizes = dict(hidden_size=64, moe_intermediate_size=64, intermediate_size=64)
    source = write(folder / "source", **MODELS["deepseek_v4"] | sizes)
    for name in ("stored", "plain"):
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
    plain = load_file(source / "model.safetensors")
    stored = dict(plain)
    for name, weight in plain.items():
        scale = f"{name.removesuffix('.weight')}.scale"
        if EXPERT.search(name):
            codes, scales = encode(weight)
            plain[name] = meaning(codes, scales)
            stored[name] = torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
            stored[scale] = torch.from_numpy(scales).view(torch.float8_e8m0fnu)
        elif LINEAR.search(name):
            stored[name], stored[scale], plain[name] = fp8(weight)
    own = {name.removeprefix("model.").replace("embed_tokens.", "embed."): tensor for name, tensor in stored.items()}
    save_file(own, folder / "stored" / "model.safetensors")
    save_file(plain, folder / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"expert_dtype": "fp4", "quantization_config": SETTINGS}
    (folder / "stored" / "config.json").write_text(json.dumps(config))
    return folder / "stored", folder / "plain"


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_logits(made, expected, caplog, tp):
    (path, plain), ids = made, tokens(60)
    way = "striped" if tp > 1 else "direct"
    (logits,) = run_steps(path, [ids], [[(0, 50)], *[[(0, 1)]] * 10], tp=tp, max_model_len=128, way=way)
    assert distance(logits, expected(plain, ids)) < TOLERANCE
    assert not any("not used" in record.message for record in caplog.records)


def test_dummy_weights(made):
    (logits,) = run_steps(made[0], [tokens(20)], load_format="dummy", max_model_len=64)
    assert 0.1 < logits.std() < 10
