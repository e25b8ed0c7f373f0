"""Config files in the forms in which models are published: the right number of parameters, and transformers' meaning.

published.json has the keys that say what a model computes, with some that say nothing; factors of longrope are ones.
"""

import json
from pathlib import Path

import pytest
import transformers
from phalanx.errors import MODEL, FatalError
from phalanx.rank.model import architectures
from phalanx.rank.model.base import TOWER
from phalanx.rank.model.choices import choose_format
from phalanx.rank.model.config import read_config
from phalanx.rank.model.measure import GroupRank, build

from .test_defaults import meaning

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
ALONE = GroupRank(0, 1)


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(tmp_path, name):
    """Within 1 % of what the model's card says, without vision and layers that predict further tokens."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    config = read_config(tmp_path)
    model = build(config, ALONE, ALONE)
    count = sum(one.numel() for name, one in model.named_parameters() if not name.startswith(TOWER))
    assert count / 1e9 == pytest.approx(PUBLISHED[name]["billions"], rel=0.01)
    if config.quantization:
        build(config, ALONE, ALONE, choose_format(config, "none"))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if PUBLISHED[name]["config"]["model_type"] != "chatglm"])
def test_meaning(tmp_path, name):
    given = {key: value for key, value in PUBLISHED[name]["config"].items() if key != "quantization_config"}
    model_type = given["model_type"]
    known = {"kimi_k2": "deepseek_v3"}.get(model_type, model_type)
    full = transformers.AutoConfig.for_model(**given | {"model_type": known}).to_dict() | {"model_type": model_type}
    ours, theirs = meaning(tmp_path, given), meaning(tmp_path, full)
    for one in (ours, theirs):
        for key in ("original", "vision_config"):  # whose keys tests of towers compare
            one.pop(key, None)
    if "text_config" in given:  # whether its head is tied, tensors say
        ours["tie_word_embeddings"] = theirs["tie_word_embeddings"]
    assert ours == theirs


@pytest.mark.parametrize(
    "size, model_type, theta, biases", [("Qwen-7B", "qwen2", 1e4, 28), ("Llama-8B", "llama", 5e5, 0)]
)
def test_distillations_of_deepseek_r1(tmp_path, size, model_type, theta, biases):
    """They are what they were distilled into, not DeepSeek; the Qwen's window of 4096 tokens is switched off."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[f"deepseek-ai/DeepSeek-R1-Distill-{size}"]["config"]))
    config = read_config(tmp_path)
    found = architectures.find(config.model_type)
    args = found.Args.from_config(config)
    model = build(config, ALONE, ALONE)
    assert config.model_type == model_type and isinstance(model, found.Model) and config.max_positions == 131072
    for i in range(args.num_hidden_layers):
        assert not args.attention_params(i).window and args.rope(i)["rope_theta"] == theta
    names = [name for name, _ in model.named_parameters()]
    assert len([name for name in names if "qkv_proj" in name and name.endswith("bias")]) == biases
    assert not any("experts" in name or "kv_a" in name for name in names)


@pytest.mark.parametrize(
    "model_type",
    [
        "kimi_k3", "phimoe", "phi4mm", "gemma3n",
        "paligemma", "bloom", "mamba", "mpt", None,
    ],
)  # fmt: skip
def test_what_is_not_served(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(FatalError, match=f"type {model_type!r}.*apertus") as stop:
        read_config(tmp_path)
    assert stop.value.code == MODEL
