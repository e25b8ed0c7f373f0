"""Quantised checkpoints by independent packers: logits of the dequantised weights, however the model is cut."""

import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.rank.model.load import load

from ..harness import distance, run_steps, tokens
from ..test_architectures import write
from . import packers

TOLERANCE = 1e-4
# Heads of 32 dimensions: 6 ranks cut none of them. 384 inner is twelve groups of 32, and three of 128.
COMMON = dict(
    hidden_size=192, intermediate_size=384, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6,
    head_dim=32, vocab_size=509, max_position_embeddings=512, bos_token_id=0, eos_token_id=2, pad_token_id=None,
)  # fmt: skip


def gptq(bits=4, group=32, symmetric=True, v2=False, **more):
    settings = dict(quant_method="gptq", bits=bits, group_size=group, sym=symmetric, desc_act=False)
    settings |= {"checkpoint_format": "gptq_v2"} if v2 else {}
    return packers.gptq(bits, group, symmetric, v2), settings | more


def awq(group=64, **more):
    settings = dict(quant_method="awq", bits=4, group_size=group, version="gemm", zero_point=True)
    return packers.awq(group), settings | more


# name → how it is stored, and the model
CASES = {
    "gptq": (gptq(), dict(model_type="llama")),
    "gptq of 8 bits": (gptq(8, 64), dict(model_type="qwen2")),  # biases
    "gptq of 8 bits, asymmetric": (gptq(8, 32, False, v2=True), dict(model_type="llama")),
    "gptq in whole columns": (gptq(4, -1), dict(model_type="llama", tie_word_embeddings=True)),
    "gptq, asymmetric": (gptq(4, 128, False), dict(model_type="phi3", hidden_size=256, num_attention_heads=6)),
    "awq": (awq(), dict(model_type="llama")),
    "awq, merged": (awq(32), dict(model_type="phi3")),  # qkv_proj and gate_up_proj whole
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name → the folder of a quantised checkpoint and of a plain one with the dequantised weights."""
    found = {}

    def make(name):
        if name not in found:
            (pack, settings), options = CASES[name]
            folder = found[name] = tmp_path_factory.mktemp("stored")
            packers.quantise(write(folder / "source", **COMMON | options), folder, pack, settings)
        return found[name] / "quantised", found[name] / "plain"

    return make


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("name", CASES)
def test_logits(made, expected, name, tp, pp):
    (path, plain), ids = made(name), tokens(60, vocab=509)
    steps = [[(0, 50)], *[[(0, 1)]] * 10]  # many rows at once, and one
    (logits,) = run_steps(path, [ids], steps, tp=tp, pp=pp, max_model_len=512)
    assert distance(logits, expected(plain, ids)) < TOLERANCE
