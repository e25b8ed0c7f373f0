"""Quantised checkpoints by independent packers: logits of the dequantised weights, however the model is cut."""

import functools
import json
import shutil

import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.kernels.quantized import e4m3, e4m3_weight_only
from phalanx.kernels.quantized.linear import dequantize
from phalanx.rank.model.load import load
from phalanx.rank.model.stored_formats import choose, compressed_tensors
from safetensors.torch import load_file, save_file

from ...reference import Reference
from ..harness import distance, run_steps, tokens
from ..test_architectures import write
from . import packers

TOLERANCE = 1e-4
# Heads of 32 dimensions: 6 ranks cut none of them. 384 inner is twelve groups of 32, and three of 128.
COMMON = dict(
    hidden_size=192, intermediate_size=384, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6,
    head_dim=32, vocab_size=509, max_position_embeddings=512, bos_token_id=0, eos_token_id=2, pad_token_id=None,
)  # fmt: skip


def gptq(bits=4, group=32, symmetric=True, v2=False, ordered=False, **more):
    settings = dict(quant_method="gptq", bits=bits, group_size=group, sym=symmetric, desc_act=ordered)
    settings |= {"checkpoint_format": "gptq_v2"} if v2 else {}
    return packers.gptq(bits, group, symmetric, v2, ordered), settings | more


def marlin(group=128, **more):
    settings = dict(quant_method="gptq", bits=4, group_size=group, sym=True, desc_act=False)
    return packers.marlin(group), settings | (more or {"checkpoint_format": "marlin"})


# 3 ranks get whole sets of 64 outputs, of heads of 64 dimensions.
TILED = dict(hidden_size=192, intermediate_size=384, num_attention_heads=6, num_key_value_heads=6, head_dim=64)


def awq(group=64, **more):
    settings = dict(quant_method="awq", bits=4, group_size=group, version="gemm", zero_point=True)
    return packers.awq(group), settings | more


def fp8(block=(128, 128), **more):
    settings = dict(quant_method="fp8", activation_scheme="dynamic") | more
    settings |= {"weight_block_size": list(block)} if block else {}
    return packers.fp8(block, "weight_scale_inv" if block else "weight_scale"), settings


def auto_round(form, pack, **more):
    settings = dict(quant_method="auto-round", packing_format=f"auto_round:{form}", bits=4, group_size=64, sym=False)
    return pack, settings | dict(data_type="int", autoround_version="0.14.2") | more


def compressed(kind, pack, **weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return pack, dict(
        quant_method="compressed-tensors", format=kind, config_groups={"group_0": group}, ignore=["lm_head"]
    )


def compressed_ints(bits=4, group=128, symmetric=True, packed=True):
    strategy = dict(strategy="group", group_size=group) if group else dict(strategy="channel")
    kind = "pack-quantized" if packed else "int-quantized"
    pack = packers.compressed_ints(bits, group, symmetric, packed)
    return compressed(kind, pack, num_bits=bits, type="int", symmetric=symmetric, **strategy)


def compressed_floats(block, **strategy):
    return compressed("float-quantized", packers.fp8(block, "weight_scale"), num_bits=8, type="float", **strategy)


# name → how it is stored, and the model
CASES = {
    "gptq": (gptq(), dict(model_type="llama")),
    "gptq of 8 bits": (gptq(8, 64), dict(model_type="qwen2")),  # biases
    "gptq of 8 bits, asymmetric": (gptq(8, 32, False, v2=True), dict(model_type="llama")),
    "gptq in whole columns": (gptq(4, -1), dict(model_type="llama", tie_word_embeddings=True)),
    "gptq, asymmetric": (gptq(4, 128, False), dict(model_type="phi3", hidden_size=256, num_attention_heads=6)),
    "gptq with desc_act": (gptq(4, 64, False, ordered=True), dict(model_type="llama")),
    "gptq of 8 bits with desc_act": (gptq(8, 64, ordered=True), dict(model_type="qwen2")),
    "marlin": (marlin(64), TILED | dict(model_type="llama")),
    "marlin in whole columns": (marlin(-1, quant_method="marlin"), TILED | dict(model_type="qwen2")),
    "marlin, merged": (marlin(64, is_marlin_format=True), TILED | dict(model_type="phi3")),
    "awq": (awq(), dict(model_type="llama")),
    "awq, merged": (awq(32), dict(model_type="phi3")),  # qkv_proj and gate_up_proj whole
    "fp8": (fp8(), dict(model_type="llama")),
    "fp8, merged": (fp8(), dict(model_type="phi3", hidden_size=200, intermediate_size=300)),
    "fp8 in odd blocks": (fp8((96, 40)), dict(model_type="qwen2", hidden_size=100, intermediate_size=303)),
    "fp8 of one scale": (fp8(None, activation_scheme="static"), dict(model_type="llama", intermediate_size=303)),
    "fp8 of one scale, by its other name": (
        (packers.fp8(None), dict(quant_method="fp8", activation_scheme="static", weight_block_size=None)),
        dict(model_type="llama", intermediate_size=303),
    ),
    "fp8 of fbgemm": (
        (packers.fp8((1, 0), "weight_scale"), dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0)),
        dict(model_type="llama"),
    ),
    "fp8 of modelopt": (
        (packers.fp8(None, "weight_scale"), dict(quant_method="modelopt", quant_algo="FP8", exclude_modules=["*head"])),
        dict(model_type="llama"),
    ),
    "auto_round as gptq": (
        auto_round("auto_gptq", packers.gptq(4, 64, False), extra_config={"lm_head": {"bits": 16}}),
        dict(model_type="llama"),
    ),
    "auto_round as gptqmodel": (auto_round("gptqmodel", packers.gptq(4, 64, False, v2=True)), dict(model_type="llama")),
    "auto_round as awq": (auto_round("auto_awq", packers.awq(64)), dict(model_type="phi3")),
    "w4a16": (compressed_ints(4, 64), dict(model_type="llama")),
    "w4a16, asymmetric": (compressed_ints(4, 32, False), dict(model_type="qwen2")),
    "w8a16": (compressed_ints(8, 64), dict(model_type="phi3")),
    "w8a16 in whole channels": (compressed_ints(8, 0, False), dict(model_type="llama")),
    "int8": (compressed_ints(8, 0, packed=False), dict(model_type="llama")),
    "int8, asymmetric": (compressed_ints(8, 0, False, packed=False), dict(model_type="llama")),
    "floats in channels": (compressed_floats((1, 0), strategy="channel"), dict(model_type="phi3", hidden_size=100)),
    "floats in tensors": (compressed_floats(None, strategy="tensor"), dict(model_type="llama")),
    "floats in blocks": (
        compressed_floats((128, 128), strategy="block", block_structure="128x128"),
        dict(model_type="llama"),
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name → the folder of a quantised checkpoint and of a plain one with the dequantised weights."""

    @functools.cache
    def make(name):
        (pack, settings), options = CASES[name]
        folder = tmp_path_factory.mktemp("stored")
        packers.quantise(write(folder / "source", **COMMON | options), folder, pack, settings)
        return folder / "quantised", folder / "plain"

    return make


@pytest.mark.sample(2)
@pytest.mark.parametrize("tp, pp", [*(pytest.param(tp, 1, marks=pytest.mark.long) for tp in (1, 2)), (3, 2)])
@pytest.mark.parametrize("name", CASES)
def test_logits(made, expected, name, tp, pp):
    (path, plain), ids = made(name), tokens(60, vocab=509)
    steps = [[(0, 50)], *[[(0, 1)]] * 10]  # many rows at once, and one
    (logits,) = run_steps(path, [ids], steps, tp=tp, pp=pp, max_model_len=512)
    assert distance(logits, expected(plain, ids)) < TOLERANCE


def test_linears_without_a_kernel_are_told(made, caplog):
    caplog.set_level("WARNING")
    loaded(made("gptq of 8 bits")[0], 1)
    assert not caplog.messages
    loaded(made("gptq of 8 bits, asymmetric")[0], 2)
    (said,) = caplog.messages
    assert "8 linears" in said
    assert "--to gptq --bits 8" in said


# checkpoint, tensor, what is left of it, and what is said
DAMAGED = [
    ("gptq", "1.mlp.up_proj.scales", None, "has no tensor {}"),
    ("gptq", "0.self_attn.o_proj.qweight", None, "has no tensor {}"),
    ("gptq", "0.mlp.down_proj.qzeros", slice(0, 6), "{} is 6 x 24, expected 12 x 24"),
    ("marlin", "1.mlp.up_proj.s", None, "has no tensor {}"),
    ("marlin", "0.self_attn.q_proj.B", None, "has no tensor {}"),
    ("marlin", "0.mlp.down_proj.s", slice(0, 3), "{} is 3 x 192, expected 6 x 192"),
    ("awq", "1.mlp.up_proj.scales", None, "has no tensor {}"),
    ("awq", "0.self_attn.o_proj.qweight", None, "has no tensor {}"),
    ("awq", "0.mlp.down_proj.qzeros", slice(0, 3), "{} is 3 x 24, expected 6 x 24"),
    ("fp8", "1.self_attn.k_proj.weight_scale_inv", None, "has no tensor {}"),
    ("fp8", "0.mlp.up_proj.weight", None, "has no tensor {}"),
    ("fp8", "0.mlp.down_proj.weight_scale_inv", slice(0, 1), "{} is 1 x 3, expected 2 x 3"),
    ("fp8 of one scale", "1.self_attn.k_proj.weight_scale", None, "has no tensor {}"),
    ("fp8 of fbgemm", "1.self_attn.k_proj.weight_scale", None, "has no tensor {}"),
    ("fp8 of modelopt", "1.self_attn.k_proj.weight_scale", None, "has no tensor {}"),
    ("w4a16", "1.mlp.up_proj.weight_scale", None, "has no tensor {}"),
    ("w4a16", "0.self_attn.o_proj.weight_packed", None, "has no tensor {}"),
    ("w4a16, asymmetric", "0.mlp.up_proj.weight_zero_point", None, "has no tensor {}"),
    ("w4a16", "0.mlp.down_proj.weight_scale", slice(0, 96), "{} is 96 x 6, expected 192 x 6"),
    ("int8", "1.mlp.up_proj.weight_scale", None, "has no tensor {}"),
    ("floats in tensors", "1.mlp.up_proj.weight_scale", None, "has no tensor {}"),
]


@pytest.mark.parametrize("name, tensor, part, words", DAMAGED)
def test_damaged(made, tmp_path, name, tensor, part, words):
    path = shutil.copytree(made(name)[0], tmp_path / "damaged")
    state = load_file(path / "model.safetensors")
    name = f"model.layers.{tensor}"
    whole = state.pop(name)
    state |= {} if part is None else {name: whole[part].contiguous()}
    save_file(state, path / "model.safetensors")
    refused(path, errors.MODEL, words.format(name))


def test_linears_that_are_multiplied_as_one_have_one_order(made, tmp_path):
    path = shutil.copytree(made("gptq with desc_act")[0], tmp_path / "mixed")
    state = load_file(path / "model.safetensors")
    state["model.layers.1.self_attn.k_proj.g_idx"] = state["model.layers.1.self_attn.k_proj.g_idx"].flip(0).contiguous()
    save_file(state, path / "model.safetensors")
    refused(path, errors.MODEL, "layers.1.self_attn.k_proj")


@pytest.mark.parametrize("change, code, words", [
    (dict(group_size=64), errors.MODEL, "qzeros is 6 x 24, expected 3 x 24"),
    (dict(bits=3), errors.MODEL, "quantization_config has bits 3; supported are 4, 8"),
    (dict(bits=8), errors.MODEL, "qweight is 24 x 192, expected 48 x 192"),
    (dict(group_size="all"), errors.MODEL, "quantization_config has group_size 'all', expected a number of inputs"),
    (dict(group_size=48), errors.MODEL, "kernels take groups of a multiple of 32 inputs, and these have 48"),
    (dict(checkpoint_format="marlin", bits=8), errors.MODEL, "quantization_config has bits 8; supported are 4"),
    (dict(checkpoint_format="marlin"), errors.MODEL, "has no tensor model.layers.0.self_attn.q_proj.B"),
    (dict(checkpoint_format="bitblas"), errors.MODEL, "has checkpoint_format 'bitblas'; supported are None, 'gptq'"),
    (dict(desc_act=True, group_size=192), errors.MODEL, "expected 1 x"),
    (dict(dynamic={"-:.*k_proj": {}, "+:.*q_proj": {"bits": 8}}), errors.MODEL, "like +:.*q_proj other settings"),
    (dict(dynamic={"-:.*[": {}}), errors.MODEL, "has the rule -:.*[, which is no regular expression"),
    (dict(modules_to_not_convert=["re:.*["]), errors.MODEL, "has the rule re:.*[, which is no regular expression"),
    (dict(dynamic={"+:.*": "x"}), errors.MODEL, "dynamic gives +:.* 'x', expected an object"),
    (dict(dynamic=[3]), errors.MODEL, "has dynamic [3], expected an object"),
])  # fmt: skip
def test_settings_that_do_not_fit(made, tmp_path, change, code, words):
    path = shutil.copytree(made("gptq")[0], tmp_path / "changed")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(config))
    refused(path, code, words)


WHOLE = dict(num_bits=8, type="int", symmetric=True, strategy="channel")


def of_group(kind="int-quantized", **weights):
    return dict(
        quant_method="compressed-tensors", format=kind, config_groups={"a": {"targets": ["Linear"], "weights": weights}}
    )


@pytest.mark.parametrize("settings, words", [
    (fp8()[1] | dict(weight_block_size=[128]), "weight_block_size [128], expected two numbers"),
    (fp8()[1] | dict(weight_block_size=[128, 0]), "weight_block_size [128, 0], expected two numbers"),
    (fp8()[1] | dict(fmt="e5m2"), "quantization_config has fmt 'e5m2'; supported are None, 'e4m3'"),
    (dict(quant_method="compressed-tensors"), "config_groups None, expected objects"),
    (of_group("marlin-24", **WHOLE), "has format 'marlin-24'; supported are 'pack-quantized', 'int-quantized'"),
    (of_group(**WHOLE | dict(num_bits=4)), "has num_bits 4; supported are 8"),
    (of_group("pack-quantized", **WHOLE | dict(num_bits=3)), "has num_bits 3; supported are 4, 8"),
    (of_group("pack-quantized", **WHOLE | dict(actorder="group")), "has actorder 'group'; supported are None,"),
    (of_group(**WHOLE | dict(strategy="tensor")), "has strategy 'tensor'; supported are 'group', 'channel'"),
    (of_group("float-quantized", num_bits=4, type="float"), "has num_bits 4; supported are 8"),
    (of_group("float-quantized", num_bits=8, type="float", strategy="token"), "has strategy 'token'; supported are"),
    (of_group("float-quantized", num_bits=8, type="float", strategy="block"), "block_structure None, expected two"),
    (of_group("nvfp4-pack-quantized", num_bits=4, type="float"), "has format 'nvfp4-pack-quantized'; supported are"),
    (of_group(**WHOLE) | dict(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config of 'sparse-24-bit"),
    (of_group(**WHOLE) | dict(transform_config={"config_groups": {"R1": {}}}), "transform_config of {'R1': {}}, which"),
    (dict(quant_method="modelopt", quant_algo="NVFP4"), "has quant_algo 'NVFP4'; supported are 'FP8': serve the"),
    (dict(quant_method="bitsandbytes", load_in_4bit=True), "(bitsandbytes) are not supported; supported are"),
    (dict(bits=4, group_size=64, mode="affine"), "quantised weights (unknown) are not supported"),
    (dict(quant_method="auto-round", packing_format="auto_round:gptq"), "has packing_format 'auto_round:gptq'"),
    (auto_round("auto_gptq", None, data_type="mx_fp")[1], "has data_type 'mx_fp'; supported are None, 'int'"),
    (auto_round("auto_gptq", None, extra_config={"model.layers.0.mlp": {"bits": 8}})[1], "model.layers.0.mlp other"),
    (auto_round("auto_gptq", None, extra_config=["lm_head"])[1], "extra_config ['lm_head'], expected objects"),
])  # fmt: skip
def test_what_is_refused(made, tmp_path, settings, words):
    config = json.loads((made("fp8")[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    refused(tmp_path, errors.MODEL, words, load_format="dummy")


def test_modules_that_a_rule_leaves_out_are_plain(made, tmp_path):
    config = json.loads((made("gptq")[0] / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {r"-:^model\.layers\.1\..*down_proj": {}, ".*": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (model,) = loaded(tmp_path, 1, load_format="dummy")
    linears = [model.get_submodule(f"model.layers.{i}.mlp.down_proj") for i in (0, 1)]
    assert [one.matrix is None for one in linears] == [True, False]


@pytest.mark.parametrize("targets, quantised", [
    (["re:.*_proj$"], True), (["model.layers.0.mlp", "model.layers.1"], True), (["lm_head"], False),
])  # fmt: skip
def test_linears_that_a_group_does_not_name_are_plain(made, tmp_path, targets, quantised):
    config = json.loads((made("fp8")[0] / "config.json").read_text())
    settings = of_group(**WHOLE)
    settings["config_groups"]["a"]["targets"] = targets
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (model,) = loaded(tmp_path, 1, load_format="dummy")
    assert (model.get_submodule("model.layers.1.mlp.down_proj").matrix is None) == quantised


def test_no_order_of_activations_may_be_false_too():
    settings = of_group("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, actorder=False)
    assert choose(settings, lambda path: None)("model.layers.0.mlp.down_proj") is not None


def test_activations_keep_16_bits_where_config_json_quantises_weights_alone():
    _, settings = CASES["floats in channels"][0]
    group = settings["config_groups"]["group_0"]
    for activations, codec in ((None, e4m3_weight_only), ({"num_bits": 8, "type": "float", "dynamic": True}, e4m3)):
        given = settings | {"config_groups": {"group_0": group | {"input_activations": activations}}}
        assert compressed_tensors.match(given, "model.layers.0.mlp.up_proj", ()).codec is codec


@pytest.mark.parametrize("module, plain", [
    ("model.layers.1.mlp.down_proj", True), ("model.language_model.layers.1.mlp.down_proj", True),
    (".*down_proj.*", True), ("^model.layers.1.mlp", True), ("model.layers.1.mlp.down", False), (".*gate_proj", False),
])  # fmt: skip
def test_what_auto_round_leaves_plain(module, plain):
    settings = auto_round("auto_gptq", None, extra_config={"lm_head": {"act_bits": None}, module: {"bits": 16}})[1]
    assert (choose(settings, lambda path: None)("model.layers.1.mlp.down_proj") is None) == plain


@pytest.mark.parametrize("name, beside, changes", [
    ("gptq", "quantize_config.json", {}),
    ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}),
    ("fp8 of modelopt", "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
])  # fmt: skip
def test_settings_in_a_file_beside_config_json(made, tmp_path, expected, name, beside, changes):
    path, plain = made(name)
    path = shutil.copytree(path, tmp_path / "older")
    config = json.loads((path / "config.json").read_text())
    settings = config.pop("quantization_config")
    settings.pop("quant_method")
    (path / "config.json").write_text(json.dumps(config))
    (path / beside).write_text(json.dumps(changes or settings))
    (logits,) = run_steps(path, [tokens(20, vocab=509)])
    assert distance(logits, expected(plain, tokens(20, vocab=509))) < TOLERANCE


def test_a_file_that_a_dequantised_model_still_has_is_ignored(made, tmp_path, expected, caplog):
    plain = made("gptq")[1]
    path, ids = shutil.copytree(plain, tmp_path / "again"), tokens(20, vocab=509)
    (path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "desc_act": False}))
    caplog.set_level("WARNING", "phalanx")
    (logits,) = run_steps(path, [ids], tp=2)
    assert distance(logits, expected(plain, ids)) < TOLERANCE
    (said,) = [one for one in caplog.messages if "ignored" in one]
    assert "quantize_config.json" in said


@pytest.mark.long
@pytest.mark.parametrize("name", [
    "gptq", "gptq of 8 bits", "gptq with desc_act", "awq", "marlin", "fp8", "fp8, merged", "w4a16", "w8a16", "int8",
    "floats in channels",
])  # fmt: skip
def test_greedy_tokens(made, name):
    check_greedy(made(name)[0], Reference(made(name)[1]))


@pytest.mark.long
@pytest.mark.parametrize("isq", ["q8_0", "q4_0"])
def test_greedy_tokens_of_weights_quantised_while_loading(made, isq):
    plain = made("gptq")[1]
    check_greedy(plain, Reference(plain, isq), isq)


def check_greedy(path, truth, isq="none", tp=2, tolerance=TOLERANCE):
    """200 tokens of transformers with the dequantised weights are each the likeliest after those before."""
    prompt = tokens(40, vocab=509)
    want, gap = truth.greedy(prompt, 200)
    (logits,) = run_steps(path, [prompt + want], [[(0, 40)], *[[(0, 1)]] * 200], tp=tp, isq=isq, max_model_len=512)
    chosen, best = logits[39:-1].gather(1, torch.tensor(want)[:, None])[:, 0], logits[39:-1].max(1).values
    assert (best - chosen).max() <= (0 if gap > tolerance else tolerance) and len(set(want)) >= 8


def refused(path, code, words, tp=1, **options):
    with pytest.raises(errors.FatalError) as stop:
        threads.run(lambda world: load(path, mesh.build(world, tp, 1), **options), tp)
    assert words in str(stop.value) and stop.value.code == code


def test_options_that_do_not_fit(made):
    path, plain = made("gptq")
    refused(path, errors.USAGE, "is quantised already (gptq): leave --isq out", isq="q8_0")
    refused(path, errors.USAGE, "is quantised by gptq: leave the option out", quantization="awq")
    refused(plain, errors.USAGE, "is quantised by none: leave the option out; --isq", quantization="awq")
    for name in ("gptq", "marlin"):  # the second as other engines have it, by their kernel
        (model,) = threads.run(lambda world, name=name: load(path, mesh.build(world, 1, 1), quantization=name), 1)
    assert model.num_weights > 0


def test_ranks_get_whole_tiles_of_marlin(made, tmp_path):
    config = json.loads((made("marlin")[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    with pytest.raises(errors.FatalError, match="64 outputs.*together") as stop:  # a rank has 96
        loaded(tmp_path, 2, load_format="dummy")
    assert stop.value.code == errors.USAGE


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["gptq", "marlin", "awq, merged"])
def test_striped_loading_and_random_weights(made, caplog, name):
    """All ways load equal bits; a rank holds the codes that one rank would; nothing is said to be left over."""
    path = made(name)[0]
    for options in (dict(way="striped"), dict(load_format="dummy")):
        whole, *parts = (loaded(path, tp, **options) for tp in (1, 2, 3))
        if "way" in options:
            assert torch.equal(*(weight(loaded(path, 1, way=way)[0]) for way in ("direct", "striped")))
        for models in parts:
            assert torch.equal(weight(whole[0]), torch.cat([weight(model) for model in models], 1))
    assert not any("not used" in record.message for record in caplog.records)


def loaded(path, tp, **options):
    return threads.run(lambda world: load(path, mesh.build(world, tp, 1), **options), tp)


def weight(model):
    return dequantize(model.get_submodule("model.layers.1.mlp.down_proj").parts[0].packed)
