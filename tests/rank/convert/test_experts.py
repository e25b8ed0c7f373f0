"""Experts rounded by GPTQ, each for the tokens that chose it: what is written is served as what it was rounded to."""

import json
import re

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.errors import MODEL, FatalError
from phalanx.kernels.quantized.stack import Stack
from phalanx.rank.convert import __main__ as program
from phalanx.rank.convert import calibrate, gptq
from phalanx.rank.convert.gptq import Scheme
from phalanx.rank.model.experts.fused import StackedLinear
from phalanx.rank.model.load import load
from safetensors.torch import load_file

from ..model.harness import run_steps, tokens
from ..model.test_architectures import write

SIZES = dict(
    model_type="qwen2_moe", hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_attention_heads=4,
    num_key_value_heads=4, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1],
    shared_expert_intermediate_size=128,
)  # fmt: skip
WINDOWS = [tokens(48, seed=seed) for seed in (1, 2, 3)]
CASES = {
    "gptq": (Scheme(4, 32, True), (32, 32), "qweight"),
    "gptq ordered": (Scheme(4, 32, False, True), (32, 32), "g_idx"),
    "awq": (Scheme(4, 64, False), (32, 32), "qzeros"),
    "marlin": (Scheme(4, 64, True), (64, 128), "B"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("experts"), **SIZES)


def alone(path):
    return load(path, threads.run(lambda comm: mesh.build(comm, 1, 1), 1)[0])


def question(source, target, to, scheme, windows=WINDOWS):
    return program.Question(
        str(source), str(target), to, scheme.bits, scheme.group, scheme.symmetric, scheme.ordered, "cpu", "f32",
        windows, [tokens(30, seed=9)],
    )  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_what_was_rounded(source, tmp_path, capsys, name):
    scheme, units, field = CASES[name]
    target, to = tmp_path / "made", name.split()[0]
    target.mkdir()
    program.convert(question(source, target, to, scheme))
    said = capsys.readouterr().err
    assert "experts' gate_proj 0." in said and "experts' down_proj 0." in said
    names = load_file(target / "model.safetensors").keys()
    assert f"model.layers.0.mlp.experts.3.up_proj.{field}" in names
    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    assert {"model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"} <= set(
        settings["modules_to_not_convert"]
    )
    rules = [
        rule for rule in settings.get("dynamic", {}) if re.match(rule.removeprefix("-:"), "model.layers.0.mlp.gate")
    ]
    assert rules == ([] if to == "awq" else [r"-:^model\.layers\.0\.mlp\.gate$"])
    model = alone(source)
    for _ in calibrate.round_model(model, WINDOWS, scheme, units):
        pass
    ids = tokens(20)
    with torch.inference_mode():
        expected = model.logits(model([calibrate.Shared(model).batch([ids])]))[:, : model.vocab_size]
    (found,) = run_steps(target, [ids], tp=2)
    assert (found - expected).abs().max() < 1e-4
    stacks = [one.packed for one in alone(target).modules() if isinstance(one, StackedLinear)]
    assert all(isinstance(one, torch.Tensor if scheme.ordered else Stack) for one in stacks) and len(stacks) == 2


def test_experts_of_a_small_batch_are_rounded_to_the_nearest(source):
    model = alone(source)
    experts = model.model.layers["0"].mlp.experts
    before = experts.gate_up_proj.weight.data.clone()
    (first, _) = calibrate.round_model(model, [tokens(calibrate.FEWEST - 2)], Scheme(4, 32, True))
    assert (first.experts, first.unseen) == (4, 4)
    nearest = gptq.quantize(before[2], torch.eye(128), Scheme(4, 32, True)).weight()
    assert torch.equal(experts.gate_up_proj.weight[2], nearest)
    assert "4 of 4 experts" in program._unseen(first)


def test_experts_lose_less_than_by_the_nearest_codes(source):
    """Tokens are alike, as an expert's are."""
    model = alone(source)
    experts, scheme = model.model.layers["0"].mlp.experts, Scheme(4, 32, True)
    torch.manual_seed(0)
    x = torch.randn(400, 16) @ torch.randn(16, 128) + 0.3 * torch.randn(400, 128)
    weight, ids = experts.gate_up_proj.weight.data[1].clone(), torch.randint(0, 4, (400, 2))
    (*_,) = calibrate.Experts(experts, [(x, ids)], scheme, (32, 32)).round()
    rows = x[(ids == 1).any(1)]
    mine, theirs = (
        ((made - weight) @ rows.t()).norm()
        for made in (experts.gate_up_proj.weight[1], gptq.quantize(weight, torch.eye(128), scheme).weight())
    )
    assert mine < 0.85 * theirs


def test_experts_in_one_tensor_are_refused(tmp_path):
    path = write(tmp_path / "model", model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    with pytest.raises(FatalError, match="one tensor") as stopped:
        program.convert(question(path, tmp_path, "gptq", Scheme(4, 32, True)))
    assert stopped.value.code == MODEL
