"""Modules that stay plain, in config.json of a rounded checkpoint."""

import re

from phalanx.rank.convert import layouts
from phalanx.rank.model.base import Model

PLAIN = [f"model.layers.1.{one}" for one in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")]


def is_plain(rules, name):
    """Decides as vLLM does: the first rule whose pattern matches from a name's beginning decides."""
    return any(rule.startswith("-:") and re.match(rule.removeprefix("-:"), name) for rule in rules)


def test_rules_of_other_engines_name_merged_linears_too():
    for kind in ("gptq", "marlin"):
        found = layouts.LAYOUTS[kind].left_out(PLAIN, Model.MERGED)
        assert found["modules_to_not_convert"] == PLAIN
        assert all(is_plain(found["dynamic"], name) for name in (*PLAIN, "model.layers.1.self_attn.qkv_proj"))
        others = "model.layers.11.self_attn.q_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.up_proj.x"
        assert not any(is_plain(found["dynamic"], name) for name in others)
    assert layouts.LAYOUTS["awq"].left_out(PLAIN, Model.MERGED) == {"modules_to_not_convert": PLAIN}
