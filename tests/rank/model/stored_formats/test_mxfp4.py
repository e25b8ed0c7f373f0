"""gpt-oss with experts in MXFP4, packed by the OCP definition: logits of the dequantised weights; gguf-py agrees."""

import json
import shutil

import numpy as np
import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.kernels.quantized import floats
from phalanx.kernels.quantized.linear import dequantize
from phalanx.kernels.quantized.stack import Stack
from phalanx.rank.model.experts.fused import StackedLinear
from phalanx.rank.model.experts.offload import OffloadOptions
from phalanx.rank.model.load import load
from safetensors.torch import load_file, save_file

from ...reference import Reference
from ..harness import distance, run_steps, tokens
from ..test_architectures import write
from .test_stored import check_greedy

TOLERANCE = 1e-4
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MODEL = dict(
    model_type="gpt_oss", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=6, head_dim=16, vocab_size=509, num_local_experts=5, num_experts_per_tok=2, sliding_window=11,
)  # fmt: skip
SETTINGS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def encode(weight):
    """weight [..., O, I] → codes uint8 of the same shape and scales uint8 [..., O, I / 32]."""
    groups = weight.numpy().reshape(*weight.shape[:-1], -1, 32)
    scales = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scaled = groups / np.exp2(scales)[..., None]
    codes = np.abs(scaled[..., None] - VALUES).argmin(-1).astype(np.uint8)
    return codes.reshape(weight.shape), (scales + 127).astype(np.uint8)


def meaning(codes, scales):
    by = np.exp2(scales.astype(np.float64) - 127)
    return torch.from_numpy((VALUES[codes] * by.repeat(32, -1)).astype(np.float32))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint, and one that has in plain what it means."""
    folder = tmp_path_factory.mktemp("mxfp4")
    source = write(folder / "source", **MODEL)
    for name in ("stored", "plain"):
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
    stored = load_file(source / "model.safetensors")
    plain = dict(stored)
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        codes, scales = encode(stored.pop(name).mT.contiguous())  # checkpoints hold plain experts inputs first
        plain[name] = meaning(codes, scales).mT.contiguous()
        blocks = torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)
        stored[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
        stored[f"{name}_scales"] = torch.from_numpy(scales)
    config = json.loads((source / "config.json").read_text())
    (folder / "stored" / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    save_file(stored, folder / "stored" / "model.safetensors")
    save_file(plain, folder / "plain" / "model.safetensors", {"format": "pt"})
    return folder / "stored", folder / "plain"


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (3, 2)])
def test_logits(made, expected, tp, pp):
    (path, plain), ids = made, tokens(60, vocab=509)
    (logits,) = run_steps(path, [ids], [[(0, 50)], *[[(0, 1)]] * 10], tp=tp, pp=pp, max_model_len=512)
    assert distance(logits, expected(plain, ids)) < TOLERANCE


def test_in_host_memory(made, expected):
    """In the form that the CPU computes from, and that of the device."""
    (path, plain), ids = made, tokens(60, vocab=509)
    for room in (OffloadOptions(9, placement="cpu"), OffloadOptions(9, placement="stream"), OffloadOptions(3)):
        (logits,) = run_steps(path, [ids], [[(0, 50)], *[[(0, 1)]] * 10], experts=room, max_model_len=512)
        assert distance(logits, expected(plain, ids)) < TOLERANCE


@pytest.mark.long
def test_greedy_tokens(made):
    path, plain = made
    check_greedy(path, Reference(plain))


def loaded(path, tp, **options):
    return threads.run(lambda world: load(path, mesh.build(world, tp, 1), **options), tp)


def stacks(model):
    return [one for one in model.modules() if isinstance(one, StackedLinear)]


def test_experts_stay_packed(made, caplog):
    """A quarter of 16 bits and their scales; nothing is said to be left over."""
    (model,) = loaded(made[0], 1)
    for one in stacks(model):
        held = sum(x.nbytes for name, x in one.named_buffers())
        assert held * 8 == one.num_weights * 4.25
        assert isinstance(one.packed, Stack)
        assert one.kept_bytes(torch.float32, torch.device("cpu")) == held + one.bias.nbytes
    assert not any("not used" in record.message for record in caplog.records)


def test_striped_loading_and_random_weights(made):
    def weights(model):
        return [one.packed.plain(torch.float32) for one in stacks(model)]

    for direct, striped in zip(
        *(weights(loaded(made[0], 2, way=way)[1]) for way in ("direct", "striped")), strict=True
    ):
        assert torch.equal(direct, striped)
    (whole,), (first, second) = (loaded(made[0], tp, load_format="dummy") for tp in (1, 2))
    for one, *parts in zip(weights(whole), weights(first), weights(second), strict=True):
        if parts[0].shape[1] == one.shape[1]:  # down: 64 inputs, and 32 with 32 of padding
            assert torch.equal(one, torch.cat(parts, 2)[:, :, :96])
    (logits,) = run_steps(made[0], [tokens(20, vocab=509)], load_format="dummy")
    assert 0.1 < logits.std() < 10


def test_each_code_means_what_gguf_says():
    gguf = pytest.importorskip("gguf")
    codes = np.random.default_rng(0).integers(0, 16, (7, 96), np.uint8)
    scales = np.array([[0, 1, 2], *np.random.default_rng(1).integers(3, 250, (6, 3))], np.uint8)
    blocks = codes.reshape(7, 3, 32)
    theirs = np.concatenate((scales[..., None], blocks[..., :16] | blocks[..., 16:] << 4), -1).reshape(7, -1)
    want = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType.MXFP4)
    pairs = torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)
    got = dequantize(floats.pack(pairs, torch.from_numpy(scales)))
    assert np.array_equal(got.numpy(), want) and torch.equal(got, meaning(codes, scales))


def refused(path, words, code=errors.MODEL):
    with pytest.raises(errors.FatalError) as stop:
        loaded(path, 1)
    assert words in str(stop.value) and stop.value.code == code


def test_damaged(made, tmp_path):
    path = shutil.copytree(made[0], tmp_path / "damaged")
    state = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    whole = state.pop(name)
    save_file(state, path / "model.safetensors")
    refused(path, f"has no tensor {name}")
    save_file(state | {name: whole[:, :, :2].contiguous()}, path / "model.safetensors")
    refused(path, f"{name} is 5 x 64 x 2, expected 5 x 64 x 3")
    save_file(state | {name: whole.int()}, path / "model.safetensors")
    refused(path, f"{name} has dtype I32; supported are U8")


def test_written_as_gguf_experts_keep_their_codes(made, tmp_path):
    """Experts stay so beside linears that are quantised."""
    gguf, ids = pytest.importorskip("gguf"), tokens(20, vocab=509)
    from ...convert.test_to_gguf import convert, to_gguf

    (expected,), (found,) = (run_steps(one, [ids]) for one in (made[0], convert(made[0], tmp_path / "x.gguf", "f32")))
    assert distance(found, expected) < TOLERANCE
    assert to_gguf.differences(made[0], tmp_path / "x.gguf") == []
    reader = gguf.GGUFReader(convert(made[0], tmp_path / "y.gguf", "q8_0"))
    kinds = {one.name: one.tensor_type.name for one in reader.tensors}
    assert {kinds[f"blk.1.ffn_{one}_exps.weight"] for one in ("gate", "up", "down")} == {"MXFP4"}
    assert (kinds["blk.0.attn_q.weight"], kinds["blk.0.ffn_gate_exps.bias"]) == ("Q8_0", "F32")


def test_inputs_of_both_matrices(made):
    """Inputs of gate and up, whose outputs are the inner size twice, and of down: kernels take both matrices or
    none."""
    (model,) = loaded(made[0], 1)
    sizes = {(one.inputs.width, one.other_inputs) for one in stacks(model)}
    assert sizes == {(MODEL["hidden_size"], MODEL["intermediate_size"]), (96, 64)}
