"""Models that are others by other names: the others' checkpoints, written as theirs, compute the same."""

import json
import re

import pytest
import torch
from phalanx.errors import FatalError
from phalanx.rank.model import architectures
from safetensors.torch import load_file, save_file

from .harness import distance, run_steps, tokens
from .shapes import MODELS
from .test_architectures import options_of, write

INTERNLM2 = dict(model_type="llama", head_dim=8, tie_word_embeddings=False)
BAICHUAN = dict(model_type="llama", num_key_value_heads=12, tie_word_embeddings=False)
QWEN = dict(model_type="qwen2", num_key_value_heads=12, intermediate_size=48, tie_word_embeddings=False)


def grouped(weights, name, kv_heads, dim):
    """The tensors of queries, keys and values as one of all key heads, and what each of these has."""
    parts = [weights.pop(f"{name}.{one}_proj.weight").unflatten(0, (kv_heads, -1)) for one in "qkv"]
    return torch.cat([part.unflatten(1, (-1, dim)) for part in parts], 1).flatten(0, 2)


def internlm2(weights, config):
    """InternLM2's tensors and config of Llama's."""
    made = dict(weights)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn"
        made[f"{name}.qkv_proj.weight"] = grouped(made, name, config["num_key_value_heads"], config["head_dim"])
    return made, {key: x for key, x in config.items() if key not in ("head_dim", "attention_bias")} | {"bias": False}


def qwen(weights, config):
    """Qwen's tensors and config of Qwen2's."""
    made = dict(weights)
    for name in [name for name in weights if re.search(r"\.q_proj\.", name)]:
        parts = [made.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        made[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    kept = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    return made, kept | dict(
        intermediate_size=2 * config["intermediate_size"], kv_channels=4, seq_length=512, rotary_emb_base=10000,
        rotary_pct=1.0, layer_norm_epsilon=config["rms_norm_eps"], no_bias=True, use_logn_attn=True,
        max_position_embeddings=8192, use_dynamic_ntk=True, tie_word_embeddings=False, torch_dtype="float32",
    )  # fmt: skip


def baichuan(weights, config):
    """Baichuan's tensors and config of Llama's."""
    made = dict(weights)
    for name in [name for name in weights if re.search(r"\.q_proj\.", name)]:
        parts = [made.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        made[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return made, config


CASES = {
    "baichuan": (BAICHUAN, baichuan),
    "internlm2": (INTERNLM2 | dict(hidden_size=96), internlm2),
    "internlm2 few keys": (INTERNLM2 | dict(hidden_size=96, num_key_value_heads=1), internlm2),
    "qwen": (QWEN, qwen),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (3, 1), (1, 2), (6, 1)])
@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path, expected, name, tp, pp):
    (options, convert), ids, model_type = CASES[name], tokens(60), name.split()[0]
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    write(there, **options)
    config = options_of(**options) | json.loads((there / "config.json").read_text())
    save(here, model_type, *convert(load_file(there / "model.safetensors"), config))
    (logits,) = run_steps(here, [ids], [[(0, 33)], [(0, 23)], *[[(0, 1)]] * 4], tp=tp, pp=pp, max_model_len=512)
    assert distance(logits, expected(there, ids)) < 1e-4


def save(path, model_type, weights, config):
    spelled = architectures.find(model_type).Model.spelled
    save_file({spelled(key): x.contiguous() for key, x in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))


@pytest.mark.parametrize("tp", [1, 3])
def test_the_head_of_baichuan_2_is_normed(tmp_path, expected, tp):
    there, here, ids = tmp_path / "there", tmp_path / "here", tokens(20)
    here.mkdir()
    write(there, **BAICHUAN, vocab_size=125696)
    weights = load_file(there / "model.safetensors")
    save(here, "baichuan", *baichuan(weights, json.loads((there / "config.json").read_text())))
    (logits,) = run_steps(here, [ids], tp=tp)
    assert distance(logits, expected(there, ids) / weights["lm_head.weight"].norm(dim=1)) < 1e-4


def test_baichuan_13b_is_refused(tmp_path):
    save(
        tmp_path,
        "baichuan",
        {"x": torch.zeros(1)},
        options_of(**BAICHUAN) | {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 40},
    )
    with pytest.raises(FatalError, match="13B.*ALiBi"):
        run_steps(tmp_path, [tokens(2)])


@pytest.mark.parametrize("tp, ep", [(1, 1), (2, 1), (2, 2)])
def test_experts_of_llama_4_in_tensors_of_their_own(tmp_path, expected, tp, ep):
    """Outputs come before inputs there, as in quantised checkpoints."""
    there, here, ids = tmp_path / "there", tmp_path / "here", tokens(40)
    here.mkdir()
    write(there, **MODELS["llama4_text"])
    made = load_file(there / "model.safetensors")
    for name in [name for name in made if ".experts." in name]:
        stem, part = name.rsplit(".", 1)
        for number, x in enumerate(made.pop(name).mT):
            parts = zip(("gate_proj", "up_proj"), x.chunk(2), strict=True) if part == "gate_up_proj" else [(part, x)]
            made |= {f"{stem}.{number}.{one}.weight": half.contiguous() for one, half in parts}
    save_file(made, here / "model.safetensors")
    (here / "config.json").write_text((there / "config.json").read_text())
    (logits,) = run_steps(here, [ids], tp=tp, ep=ep)
    assert distance(logits, expected(there, ids)) < 1e-4
