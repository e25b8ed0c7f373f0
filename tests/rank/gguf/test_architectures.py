"""rank/gguf/architectures with metadata that few files have."""

import re
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
from phalanx.errors import FatalError
from phalanx.rank.gguf import architectures, checkpoint
from phalanx.rank.gguf.architectures import apertus, deepseek2, falcon_h1, kimi_linear, mistral3, mistral4
from phalanx.rank.gguf.architectures._common import rope
from phalanx.rank.gguf.header import Header
from phalanx.rank.gguf.metadata import Metadata
from phalanx.rank.model import architectures as models

NUMBERS = {"embedding_length": 64, "attention.head_count": 4, "context_length": 512}


def metadata(**given):
    """Entries as Metadata has them; the keys without the architecture's name."""
    found = NUMBERS | {key.replace("__", "."): value for key, value in given.items()}
    return SimpleNamespace(
        number=lambda key, other=None: found.get(key, other),
        integer=lambda key, other=None: found.get(key, other),
        text=lambda key, other=None: found.get(key, other),
        has=found.__contains__,
        flag=lambda key, other=None: found.get(key, other),
        tensor=found.get,
        vector=lambda name: None,
        given=lambda **names: {},
        architecture="llama",
        file="x.gguf",
    )


def test_layers_without_heads_or_an_mlp_are_zeros_of_their_lists_alone():
    lists = {"attention.head_count_kv": [0, 2, 2], "feed_forward_length": [8, 0, 8], "expert_used_count": [0, 2, 2]}
    values = {f"llama.{key}": value for key, value in lists.items()} | {"llama.expert_count": [4, 4, 4]}
    m = Metadata([Header(Path("x.gguf"), {"general.architecture": "llama"} | values, {}, {})])
    assert [m.integer(key) for key in ("attention.head_count_kv", "feed_forward_length", "expert_count")] == [2, 8, 4]
    with pytest.raises(FatalError, match="expert_used_count"):
        m.integer("expert_used_count")


def test_linear_rope_as_files_of_2023_have_it():
    old = rope(metadata(rope__scale_linear=4.0))
    new = rope(metadata(**{"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}))
    assert old == new and (new["rope_type"], new["factor"]) == ("linear", 4.0)
    assert "rope_type" not in rope(metadata(rope__scale_linear=1.0))


def test_an_unknown_rope_is_refused():
    with pytest.raises(FatalError, match="rope.scaling.type is 'spiral'"):
        rope(metadata(rope__scaling__type="spiral"))


@pytest.mark.parametrize("experts, groups", [(160, (8, 3)), (256, (8, 4)), (64, (1, 1))])
def test_groups_of_experts_that_older_files_of_deepseek_do_not_name(experts, groups):
    given = dict(expert_count=experts, expert_shared_count=1, block_count=2)
    made = deepseek2._router(metadata(**given))
    assert (made["n_group"], made["topk_group"]) == groups
    assert made["topk_method"] == ("greedy" if groups == (1, 1) else "group_limited_greedy")
    assert made["model_type"] == "deepseek_v2" and made["scoring_func"] == "softmax"
    made = deepseek2._router(metadata(**given, **{"blk__1__exp_probs_b__bias": True}))
    assert (made["n_group"], made["topk_group"], made["topk_method"]) == (*groups, "noaux_tc")
    assert made["model_type"] == "deepseek_v3" and made["scoring_func"] == "sigmoid"
    named = metadata(**given, expert_group_count=1, expert_group_used_count=1)
    assert (deepseek2._router(named)["n_group"], deepseek2._router(named)["topk_group"]) == (1, 1)


def test_layers_of_deepseek_that_predict_further_tokens(monkeypatch):
    usual = {"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 24, "rope_parameters": {}}
    monkeypatch.setattr(deepseek2, "common", lambda m: dict(usual))
    made = deepseek2.config(metadata(
        block_count=3, nextn_predict_layers=1, feed_forward_length=128, vocab_size=99, expert_count=8,
        expert_used_count=2, expert_feed_forward_length=32, expert_shared_count=1, rope__dimension_count=8,
        attention__key_length=24, attention__value_length=16, attention__kv_lora_rank=32,
        attention__layer_norm_rms_epsilon=1e-6,
    ))  # fmt: skip
    assert (made["num_hidden_layers"], made["num_nextn_predict_layers"]) == (2, 1)
    assert (made["qk_nope_head_dim"], made["v_head_dim"], made["q_lora_rank"]) == (16, 16, None)


def test_every_model_that_has_a_name_in_gguf_can_be_read():
    def plain(name):
        return name.replace("-", "").replace("_", "")

    names = {plain(name): name for name in gguf.MODEL_ARCH_NAMES.values()}
    # There is no reader yet.
    unread = {"minicpm3", "gptneox"}
    unread |= {
        "bailingmoe",
        "qwen",
        "baichuan",
        "falcon",
        "gpt2",
        "gptj",
    }
    both = {names[plain(one)] for one in models.supported() if plain(one) in names} - unread
    assert {architectures.spelled(name) for name in both} <= set(architectures.supported())
    assert {plain(name) for name in architectures.supported()} <= names.keys()


def test_the_documentation_has_each():
    text = (Path(__file__).parents[3] / "docs/formats.md").read_text()
    table = text.partition("### Architectures of GGUF files")[2].partition("\n- ")[0]
    named = {one for row in table.splitlines() if row.startswith("| `") for one in row.split("|")[1].split(", ")}
    assert {architectures.spelled(one.strip().strip("`")) for one in named} == set(architectures.supported())
    written = {one for row in table.splitlines() if "|" in row for one in re.findall("`(\\w+)`", row.split("|")[3])}
    assert set(architectures.written()) == written


@pytest.mark.parametrize("beta, kind", [(None, "mistral"), (0.1, "ministral3")])
def test_mistral_3_and_ministral_3(monkeypatch, beta, kind):
    monkeypatch.setattr(mistral3, "common", lambda m: {"rope_parameters": {"rope_theta": 1e6}})
    given = {"rope__scaling__yarn_log_multiplier": 1.0} | ({"attention__temperature_scale": beta} if beta else {})
    made = mistral3.config(metadata(**given))
    rope = made["rope_parameters"]
    assert made["model_type"] == kind
    assert rope.get("llama_4_scaling_beta") == beta
    assert (rope["mscale"], rope["mscale_all_dim"]) == (1.0, 1.0)
    assert beta or made["sliding_window"] is None  # without the key, layers would see 4096 tokens
    with pytest.raises(FatalError, match="mistral3 models with experts"):
        mistral3.config(metadata(expert_count=8))


@pytest.mark.parametrize("beta", [None, 0.2])
def test_mistral_4_has_a_temperature_though_files_lack_it(monkeypatch, beta):
    given = {"attention__temperature_scale": beta} if beta else {}
    monkeypatch.setattr(deepseek2, "config", lambda m: {"rope_parameters": deepseek2._rope(m, {})})
    rope = mistral4.config(metadata(**given))["rope_parameters"]
    assert rope == {"llama_4_scaling_beta": beta or 0.1, "original_max_position_embeddings": 512}
    router = deepseek2._router(metadata(**given, expert_count=8, expert_shared_count=1, block_count=2))
    assert router["model_type"] == ("mistral4" if beta else "deepseek_v2")


@pytest.mark.parametrize("given, text", [({}, "lm_head_multiplier"), ({"ssm__has_mup": True}, "multipliers")])
def test_files_of_falcon_h1_without_multipliers_are_refused(given, text):
    with pytest.raises(FatalError, match=text):
        falcon_h1.config(metadata(**given))


@pytest.mark.parametrize(
    "part, shapes, expected",
    [
        ("ssm_a", [(1, 1, 6, 1), (6, 1), (6,)], (1, 1, 6, 1)),
        ("ssm_conv1d_k", [(1, 72, 1, 4), (72, 1, 4), (72, 4)], (72, 1, 4)),
    ],
)
def test_axes_of_one_that_files_of_kimi_linear_may_leave_out(part, shapes, expected):
    """The converter writes four axes; llama.cpp's quantiser drops leading ones."""
    found = [checkpoint._shape(architectures.find("kimi-linear"), f"blk.0.{part}", one) for one in shapes]
    assert found == [expected] * len(shapes)


def test_kimi_linear_chooses_among_all_experts(monkeypatch):
    """Files do not name groups of experts; DeepSeek's of as many experts mean eight then."""
    usual = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 24, "rope_parameters": {}}
    monkeypatch.setattr(deepseek2, "common", lambda m: dict(usual))
    given = dict(
        block_count=2, expert_count=256, expert_used_count=8, expert_feed_forward_length=32, expert_shared_count=1,
        expert_gating_func=2, rope__dimension_count=8, attention__key_length=40, attention__value_length=16,
        attention__key_length_mla=24, attention__value_length_mla=16, attention__kv_lora_rank=32, kda__head_dim=16,
        ssm__conv_kernel=4,
    )  # fmt: skip
    with pytest.raises(FatalError, match="ssm_a"):
        kimi_linear.config(metadata(**given))
    made = kimi_linear.config(metadata(**given, blk__0__ssm_a=SimpleNamespace(shape=(1, 1, 6, 1))))
    assert (made["n_group"], made["topk_group"], made["norm_topk_prob"]) == (1, 1, True)
    assert (made["linear_num_heads"], made["layer_types"]) == (6, ["linear_attention", "full_attention"])
    assert (made["qk_nope_head_dim"], made["v_head_dim"]) == (16, 16)


def test_an_activation_of_another_slope_is_refused(monkeypatch):
    monkeypatch.setattr(apertus, "common", lambda m: {})
    m = metadata()
    m.values = {"xielu.beta": [0.5, 0.7]}
    with pytest.raises(FatalError, match=r"xielu.beta is \[0.5, 0.7\]; 0.5 is supported"):
        apertus.config(m)
    m.values = {"xielu.beta": 0.5}
    assert apertus.config(m) == {"model_type": "apertus", "attention_bias": False}
