"""The weights of `phalanx fit` in each format of quantised checkpoints, against ranks that load them, within 5 %."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.quantized import target
from phalanx.launcher.commands.fit import memory
from phalanx.launcher.commands.fit.memory import Layout
from phalanx.rank import options
from phalanx.rank.model.formats._packed import PackedPart
from phalanx.rank.model.load import load
from phalanx.rank.model.weights import dummy

from ....checkpoints import make_checkpoint
from ....rank.model.stored_formats.packers import gptq as pack_gptq
from ....rank.model.stored_formats.packers import quantise
from .configs import read, write

CONTEXT = 64
LAYOUTS = [(1, 1), (2, 1), (1, 2)]
# Few bytes are outside the linears.
SIZES = {
    "hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512,
    "vocab_size": 32, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT, "torch_dtype": "float16",
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
}  # fmt: skip


def gptq(bits=4, group=64, sym=True, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, **more}


def compressed(kind, **weights):
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


def ints(kind, bits, sym=True, group=0):
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return compressed(kind, num_bits=bits, type="int", symmetric=sym, **strategy)


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
DENSE = {
    "gptq": gptq(),
    "gptq, asymmetric": gptq(4, 128, False),
    "gptq in whole columns": gptq(4, -1),
    "gptq with desc_act": gptq(4, 64, desc_act=True),
    "gptq with desc_act, 128": gptq(4, 128, desc_act=True),
    "gptq of 8 bits": gptq(8),
    "gptq of 8 bits, asymmetric": gptq(8, 32, False),
    "gptq of 8 bits, desc_act": gptq(8, 64, desc_act=True),
    "marlin": gptq(4, 128, checkpoint_format="marlin"),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "w4a16": ints("pack-quantized", 4, group=64),
    "w8a16": ints("pack-quantized", 8, group=64),
    "w8a16, asymmetric": ints("pack-quantized", 8, False, 64),
    "int8": ints("int-quantized", 8),
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 of one scale": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8 in channels": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
}
OF_EXPERTS = "gptq of 8 bits", "gptq of 8 bits, asymmetric", "marlin", "w4a16", "int8", "fp8 in channels", "fp8"
IN_SITU = "fp8", "q8_0", "q2k", "q4km"
CASES = {
    **{name: ({"model_type": "llama"}, settings, "none") for name, settings in DENSE.items()},
    **{f"experts: {name}": ({"model_type": "qwen3_moe"}, DENSE[name], "none") for name in OF_EXPERTS},
    **{f"experts: --isq {isq}": ({"model_type": "qwen3_moe"}, None, isq) for isq in IN_SITU},
    "experts: mxfp4": ({"model_type": "gpt_oss", "sliding_window": 11}, MXFP4, "none"),
}

WHILE_LOADING = {f"--isq {isq}": ({"model_type": "llama"}, None, isq) for isq in options.IN_SITU}


@pytest.fixture(autouse=True)
def few_numbers(monkeypatch):
    monkeypatch.setattr(dummy, "PERIOD", 65_537)


def path_of(directory, name):
    model, settings, isq = (CASES | WHILE_LOADING)[name]
    config = SIZES | model | ({"quantization_config": settings} if settings else {})
    return write(directory, config), isq


def loaded(path, tp, pp, isq="none", load_format="dummy"):
    def rank(world):
        grid = mesh.build(world, tp, pp)
        return load(path, grid, "cpu", "bf16", max_model_len=CONTEXT, load_format=load_format, isq=isq)

    return threads.run(rank, tp * pp)


def compare(path, isq, layouts, load_format="dummy", off=0.05):
    shape = read(path, "bf16", "cpu", isq=isq, most=2)
    for tp, pp in layouts:
        stages = memory.stages(shape, Layout(tp, pp), CONTEXT)
        for rank, model in enumerate(loaded(path, tp, pp, isq, load_format)):
            said = stages[pp - 1 - rank // tp].loaded  # rank 0 is on the last stage
            assert said == pytest.approx(model.weight_bytes, rel=off), (tp, pp, rank)


@pytest.mark.parametrize("name", CASES)
def test_bytes(tmp_path, name):
    compare(*path_of(tmp_path, name), LAYOUTS[:1])


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_shared_out_weights(tmp_path, name):
    compare(*path_of(tmp_path, name), LAYOUTS[1:] if "desc_act" not in name else [(1, 2)])  # random g_idx is too even


@pytest.mark.parametrize("name", [*DENSE, *WHILE_LOADING])
def test_bytes_on_gpus(tmp_path, monkeypatch, name):
    """The bytes of what is packed for one."""
    path, isq = path_of(tmp_path, name)
    monkeypatch.setattr(target, "of", lambda x: "cuda")
    (model,) = loaded(path, 1, 1, isq)
    parts = [one for one in model.modules() if isinstance(one, PackedPart)]
    held = sum(x.nbytes for part in parts for x in part.buffers())
    said = sum(part.kept_bytes(torch.bfloat16, torch.device("cuda")) for part in parts)
    assert parts and said == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("group, tp", [(64, 1), (64, 2), (128, 2)])
def test_bytes_of_ordered_inputs(tmp_path, group, tp):
    """Real desc_act: a rank has any number of a group's inputs, and fills them up."""
    sizes = dict(hidden_size=512, head_dim=128, num_attention_heads=4, num_key_value_heads=4, intermediate_size=1024)
    source = make_checkpoint(tmp_path / "source", **sizes, num_hidden_layers=1)
    quantise(source, tmp_path, pack_gptq(4, group, True, ordered=True), gptq(4, group, desc_act=True))
    compare(tmp_path / "quantised", "none", [(tp, 1)], "auto")
