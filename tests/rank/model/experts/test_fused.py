"""Experts however the checkpoint holds them and however it is read."""

import re

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.errors import MODEL, FatalError
from phalanx.kernels.moe.router import RouterParams
from phalanx.rank.model.experts.fused import StackedLinear
from phalanx.rank.model.layers.moe import Router
from phalanx.rank.model.load import load
from safetensors.torch import load_file, save_file

from ..harness import run_steps, tokens
from ..test_architectures import MODELS, write

NAME = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    return write(tmp_path_factory.mktemp("apart"), **MODELS["qwen3_moe"])


@pytest.fixture(scope="module")
def stacked(apart, tmp_path_factory):
    """The model with all experts of a layer in one tensor, gate over up."""
    path, given = tmp_path_factory.mktemp("stacked"), load_file(apart / "model.safetensors")
    (path / "config.json").write_bytes((apart / "config.json").read_bytes())
    found = {name: x for name, x in given.items() if not NAME.fullmatch(name)}
    for start in {match[1] for match in map(NAME.fullmatch, given) if match}:
        of = lambda part: [given[f"{start}.{i}.{part}_proj.weight"] for i in range(10)]  # noqa: B023, E731
        both = [torch.cat(routed_id) for routed_id in zip(of("gate"), of("up"), strict=True)]
        found |= {f"{start}.gate_up_proj": torch.stack(both), f"{start}.down_proj": torch.stack(of("down"))}
    save_file(found, path / "model.safetensors")
    return path


@pytest.mark.parametrize("way", ["direct", "striped"])
@pytest.mark.parametrize("tp, pp", [(1, 1), (3, 1), (2, 2)])
def test_all_ways_of_loading_make_the_same(apart, stacked, tp, pp, way):
    ids = tokens(30)
    (want,) = run_steps(apart, [ids], tp=tp, pp=pp)
    for path in (apart, stacked):
        (got,) = run_steps(path, [ids], tp=tp, pp=pp, way=way)
        assert torch.equal(got, want)


def test_random_weights_do_not_depend_on_the_cut(apart):
    def weights(world):
        model = load(apart, mesh.build(world, world.size, 1), load_format="dummy")
        return [one.weight.clone() for one in model.modules() if isinstance(one, StackedLinear)]

    (whole,), halves = threads.run(weights, 1), threads.run(weights, 2)
    for one, a, b in zip(whole, *halves, strict=True):
        if a.shape[1] == one.shape[1]:  # down
            assert torch.equal(one, torch.cat((a, b), 2)) and one.std(dim=(1, 2)).min() > 0.1
        else:
            both = [torch.cat(routed_id, 1) for routed_id in zip(a.chunk(2, 1), b.chunk(2, 1), strict=True)]
            assert torch.equal(one, torch.cat(both, 1))
    assert not torch.equal(whole[0][0], whole[0][1])


def test_an_expert_that_is_missing_or_misshapen_is_named(apart, tmp_path):
    given = load_file(apart / "model.safetensors")
    (tmp_path / "config.json").write_bytes((apart / "config.json").read_bytes())
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    save_file(given | {name: given[name][:-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(FatalError, match=f"{name} is 27 x 48, expected 28 x 48") as stop:
        run_steps(tmp_path, [tokens(3)])
    assert stop.value.code == MODEL
    del given[name]
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(FatalError, match=f"has no tensor {name}"):
        run_steps(tmp_path, [tokens(3)])


def test_more_experts_a_token_than_there_are(apart, tmp_path):
    text = (apart / "config.json").read_text()
    (tmp_path / "config.json").write_text(re.sub(r'"num_experts_per_tok": \d+', '"num_experts_per_tok": 11', text))
    with pytest.raises(FatalError) as stop:
        load(tmp_path, threads.run(lambda world: mesh.build(world, 1, 1), 1)[0], load_format="dummy")
    assert "config.json: num_experts_per_tok" in str(stop.value)
    assert stop.value.code == MODEL


def test_groups_that_do_not_divide_the_experts():
    with pytest.raises(FatalError) as stop:
        Router(8, 10, RouterParams(2, groups=3))
    assert re.search("config.json.*10 experts.*groups", str(stop.value)) and stop.value.code == MODEL


def test_the_correction_of_a_router_keeps_its_precision(tmp_path):
    """In 16 bits it would choose other experts."""
    path = write(tmp_path, **MODELS["glm4_moe"])
    model = load(path, threads.run(lambda world: mesh.build(world, 1, 1), 1)[0], dtype="bf16")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    (bias,) = (one.e_score_correction_bias for path, one in model.named_modules() if path == name.rpartition(".")[0])
    assert bias.dtype == torch.float32 and torch.equal(bias, load_file(path / "model.safetensors")[name])
